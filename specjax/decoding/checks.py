"""Everything that can be wrong with a call, found before anything is compiled."""

import numpy as np

from specjax.decoding.state import Decoder
from specjax.models import LanguageModel
from specjax.penalties import Penalties
from specjax.protocol import FIXED, Drafter, Verifier
from specjax.sampling import Sampling


def as_prompts(prompts, vocab_size: int) -> list[np.ndarray]:
    """Prompts as a list of int32 arrays.

    Raises:
        ValueError: no prompts, an empty prompt, ids that are not integers or not in the vocabulary.
    """
    if not len(prompts):
        raise ValueError("prompts is empty; give at least one prompt")
    checked = []
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise ValueError(f"prompt {row} must be a sequence of token ids; got shape {ids.shape}")
        if not ids.size:
            raise ValueError(
                f"prompt {row} is empty; a prompt needs at least one token, such as a beginning-of-text id"
            )
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt {row} must hold integer token ids; got {ids.dtype}")
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(
                f"prompt {row} holds token id {bad}; the target's vocabulary has ids 0 to {vocab_size - 1}"
            )
        checked.append(ids.astype(np.int32))
    return checked


def as_limits(max_new_tokens, batch: int) -> np.ndarray:
    """New tokens allowed per row, [B]."""
    limits = np.asarray(max_new_tokens)
    integers = np.issubdtype(limits.dtype, np.integer)
    if not integers or limits.shape not in ((), (batch,)) or (limits < 1).any() or (limits >= 2**31).any():
        raise ValueError(
            f"max_new_tokens must be an integer >= 1 and < 2**31, or {batch} of them, one per row; "
            f"got {max_new_tokens!r}"
        )
    return np.broadcast_to(limits, (batch,)).astype(np.int64)  # wide, until it is known to fit into the context


def as_stop_ids(stop_ids, vocab_size: int) -> np.ndarray:
    """Stop ids padded with -1 to a multiple of 8, so that their number does not retrace."""
    ids = np.asarray(stop_ids)
    if ids.ndim != 1 or (
        ids.size and (not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size)
    ):
        raise ValueError(f"stop_ids must be a list of token ids from 0 to {vocab_size - 1}; got {stop_ids!r}")
    padding = -ids.size % 8 if ids.size else 8
    return np.pad(ids.astype(np.int32), (0, padding), constant_values=-1)


def check_pair(
    target: LanguageModel,
    drafter: Drafter,
    drafter_params,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
) -> Decoder:
    """Check that models and rule belong together; returns the static description of the run."""
    chain = drafter.topology.is_chain
    siblings = FIXED if draft_sampling.greedy and not chain else drafter.siblings
    if drafter.vocab_size not in (None, target.config.vocab_size):
        raise ValueError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens and the target's {target.config.vocab_size}; "
            "both must use the same tokenizer (where it is but padded to another size, an independent drafter takes "
            f"target_vocab_size={target.config.vocab_size})"
        )
    if drafter.target not in (None, target.config):
        raise ValueError(
            f"this {type(drafter).__name__} drafter was made for another target: "
            f"{_difference(drafter.target, target.config)}"
        )
    if siblings not in verifier.siblings:
        at_zero = " at temperature 0" if siblings != drafter.siblings else ""
        raise ValueError(
            f"verifier {verifier.name!r} takes siblings {sorted(verifier.siblings)}; "
            f"this drafter proposes {siblings!r}{at_zero}: use 'multi_round' or 'traversal'"
        )
    if not verifier.trees and not chain:
        raise ValueError(
            f"verifier {verifier.name!r} takes chains only; this drafter proposes a tree: use 'multi_round' or "
            "'traversal'"
        )
    if verifier.greedy_only and not sampling.greedy:
        instead = "token" if chain else "multi_round"
        raise ValueError(
            f"verifier {verifier.name!r} keeps the target's law at temperature 0 only; set temperature=0 or use "
            f"{instead!r}"
        )
    if drafter.topology.passengers and len(drafter.widths) > 1:
        raise ValueError(
            f"passengers run in every round, so this drafter needs one width, {drafter.topology.num_nodes + 1}; "
            f"it names {drafter.widths}"
        )
    target.check("target")
    drafter.check_params(drafter_params)
    return Decoder(target.config, drafter, verifier)


def check_context(decoder: Decoder, lengths: np.ndarray, limits: np.ndarray) -> None:
    """Prompt and new tokens must fit into the context of both models."""
    for role, context in (("target", decoder.target.context_length), ("drafter", decoder.drafter.context_length)):
        if context is None:
            continue
        row = int(np.argmax(lengths + limits))
        if lengths[row] + limits[row] > context:
            raise ValueError(
                f"row {row}: {lengths[row]} prompt tokens + {limits[row]} new tokens exceed the {role}'s context of "
                f"{context}; shorten the prompt or lower max_new_tokens to {max(int(context - lengths[row]), 0)}"
            )


def _difference(one, other) -> str:
    """The first field in which two configs differ."""
    name = one.differing_fields(other)[0]
    return f"its {name} is {getattr(one, name)!r}, here it is {getattr(other, name)!r}"


def check_penalties(penalties: Penalties, stop_ids: np.ndarray, limits: np.ndarray, vocab_size: int) -> None:
    """Penalties with one value per row must leave a token in every row, and fit to the other limits.

    Args:
        stop_ids: padded with -1.
        limits: new tokens allowed per row, [B].
    """
    at_least = np.zeros(limits.shape, int)
    if penalties.min_new_tokens is not None:
        at_least = np.asarray(penalties.min_new_tokens)
        row = int(np.argmax(at_least - limits))
        if at_least[row] > limits[row]:
            raise ValueError(
                f"row {row}: min_new_tokens {at_least[row]} exceeds max_new_tokens {limits[row]}; lower the one or "
                "raise the other"
            )
    banned = np.full((limits.size, 0), -1) if penalties.banned_ids is None else np.asarray(penalties.banned_ids)
    if banned.size and banned.max() >= vocab_size:
        raise ValueError(f"banned_ids must be from 0 to {vocab_size - 1}, the target's vocabulary; got {banned.max()}")
    for row, ids in enumerate(banned):
        never = set(ids.tolist()) - {-1}
        early = set(stop_ids.tolist()) - {-1} - never if at_least[row] else set()
        if len(never) + len(early) == vocab_size:
            stops = f" and, before min_new_tokens, the other {len(early)} as stop ids" if early else ""
            raise ValueError(
                f"row {row}: {len(never)} of {vocab_size} tokens are banned{stops}, so that none is left; ban fewer"
            )


def check_type(name: str, value, kind: type, example: str) -> None:
    """An optional argument must be of its kind."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, such as {example}; got {value!r}")
