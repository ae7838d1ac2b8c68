"""What tests of the training loop watch it with."""


import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.events import EventWriter, Progress


class Recorder(EventWriter):
    """A writer that remembers."""

    def __init__(self):
        super().__init__(None)
        self.numbers, self.texts = {}, []

    def scalars(self, values, step):
        super().scalars(values, step)  # checks the tags
        for tag, value in values.items():
            self.numbers.setdefault(tag, []).append((step, value))

    def text(self, tag, text, step=0):
        super().text(tag, text, step)
        self.texts.append((step, tag, text))


class Counter(Progress):
    """A silent bar that runs an action when a step's metrics arrive."""

    def __init__(self, at=None, action=None):
        super().__init__(None, "", enabled=False)
        self.at, self.action = at, action

    def update(self, units=1, **figures):
        super().update(units, **figures)
        if self.count == self.at:
            self.action()


def same_batch(params, key, batch):
    return batch


def score(params):
    yield "held_out/score", float(jnp.sum(params["table"]))


def assert_same_run(resumed, whole):
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, resumed.state.replace(key=jax.random.key_data(resumed.state.key))),
        jax.tree.map(np.asarray, whole.state.replace(key=jax.random.key_data(whole.state.key))),
    )
    assert resumed.history == whole.history
