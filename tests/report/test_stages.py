"""A stage runs once per set of inputs; what is damaged or changed runs again, what was interrupted goes on."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.report.stages import Stages


class Counter:
    """A stage that counts its calls and leaves a file, failing on the first of them if told to."""

    def __init__(self, fail_first=False):
        self.calls, self.fail_first, self.seen = 0, fail_first, []

    def __call__(self, folder):
        self.calls += 1
        self.seen.append(sorted(p.name for p in folder.iterdir() if not p.name.startswith("stage")))
        (folder / "checkpoint").write_text(str(self.calls))
        if self.fail_first and self.calls == 1:
            raise KeyboardInterrupt
        return {"loss": np.float32(1.5), "shape": (2, 3), "nan": float("nan"), "calls": self.calls}


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int = 4
    rate: float = 0.1


def run_once(workdir, function, inputs, load=None, name="target"):
    said = []
    stages = Stages(workdir, echo=said.append)
    return stages.run(name, inputs, function, load), said, stages


def test_second_run_reuses_and_says_so(tmp_path):
    function = Counter()
    first, said, stages = run_once(tmp_path, function, {"settings": Settings()})
    assert said == [] and stages.records[0]["reused"] is False
    second, said, again = run_once(tmp_path, function, {"settings": Settings()})
    assert function.calls == 1
    assert said == ["target: finished earlier, reused"]
    assert first == second == {"loss": 1.5, "shape": [2, 3], "nan": None, "calls": 1}
    assert again.records == [{**stages.records[0], "reused": True}]
    assert again.records[0]["seconds"] > 0
    assert again.hash_of("target") == stages.hash_of("target")


def test_changed_inputs_run_again_in_an_empty_folder(tmp_path):
    function = Counter()
    _, _, first = run_once(tmp_path, function, {"settings": Settings(), "steps": 1})
    result, said, second = run_once(tmp_path, function, {"settings": Settings(rate=0.2), "steps": 1})
    assert result["calls"] == 2 and function.seen == [[], []]
    assert said == ["target: settings changed, running again"]
    assert first.hash_of("target") != second.hash_of("target")
    run_once(tmp_path, function, {"settings": Settings(), "steps": 1})
    assert function.calls == 3  # only the latest is kept


def test_interrupted_stage_keeps_its_folder_only_for_the_same_inputs(tmp_path):
    for inputs, seen in (({"steps": 1}, ["checkpoint"]), ({"steps": 2}, [])):
        function = Counter(fail_first=True)
        with pytest.raises(KeyboardInterrupt):
            run_once(tmp_path / str(seen), function, {"steps": 1})
        result, said, _ = run_once(tmp_path / str(seen), function, inputs)
        assert result["calls"] == 2 and function.seen[1] == seen
        assert said == ["target: interrupted earlier, going on" if seen else "target: steps changed, running again"]


@pytest.mark.parametrize("file", ["result.json", "stage.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"hash": 1}', '{"hash": "abc", "result'])
def test_damaged_files_run_again(tmp_path, file, content):
    function = Counter()
    run_once(tmp_path, function, {"steps": 1})
    (tmp_path / "stages" / "target" / file).write_text(content)
    result, said, _ = run_once(tmp_path, function, {"steps": 1})
    assert result["calls"] == 2 and function.seen[1] == []
    assert len(said) == 1 and "running again" in said[0]
    assert run_once(tmp_path, function, {"steps": 1})[1] == ["target: finished earlier, reused"]


def test_result_of_other_inputs_is_not_taken(tmp_path):
    function = Counter()
    run_once(tmp_path, function, {"steps": 1})
    path = tmp_path / "stages" / "target" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hash": "0" * 64}))
    assert run_once(tmp_path, function, {"steps": 1})[0]["calls"] == 2


def test_load_gives_the_value_and_finds_damage(tmp_path):
    def load(folder, result):
        text = (folder / "checkpoint").read_text()
        if text != str(result["calls"]):
            raise ValueError("checkpoint\nis damaged")
        return ("model", text)

    function = Counter()
    for _ in range(2):
        assert run_once(tmp_path, function, {}, load)[0] == ("model", "1")
    assert function.calls == 1
    (tmp_path / "stages" / "target" / "checkpoint").write_text("x")
    value, said, _ = run_once(tmp_path, function, {}, load)
    assert value == ("model", "2")
    assert said == ["target: what it left is damaged (checkpoint is damaged), running again"]


def test_a_stage_runs_again_when_what_it_builds_on_did(tmp_path):
    upstream, downstream = Counter(), Counter()

    def both():
        stages = Stages(tmp_path, echo=lambda _: None)
        stages.run("target", {"steps": 1}, upstream)
        stages.run("drafter", {"target": stages.hash_of("target")}, downstream)

    both()
    both()
    assert (upstream.calls, downstream.calls) == (1, 1)
    (tmp_path / "stages" / "target" / "result.json").unlink()  # same inputs, another attempt
    both()
    assert (upstream.calls, downstream.calls) == (2, 2)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "twice"])
def test_names(tmp_path, name):
    stages = Stages(tmp_path, echo=lambda _: None)
    stages.run("twice", {}, Counter())
    with pytest.raises(ValueError, match="plain name"):
        stages.run(name, {}, Counter())


def test_what_json_cannot_hold_is_an_error_before_the_stage_runs(tmp_path):
    function = Counter()
    with pytest.raises(TypeError, match="function"):
        run_once(tmp_path, function, {"loss": lambda: 0})
    assert function.calls == 0
