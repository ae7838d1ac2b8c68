"""Targets trained with their own drafter, small: both methods run, are measured against themselves, and are reused."""

import pytest

from configs import joint_training as joint_config
from experiments import joint_training
from tests.experiments.test_distillation import tiny


@pytest.mark.slow
def test_both_methods(tmp_path_factory, capsys):
    text, workdir = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("run")
    for i in range(40):
        (text / f"{i}.txt").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 8)
    small, config = tiny(text), joint_config.get_config()
    config.reuse = ""
    for name in ("corpus", "tokenizer", "target", "target_training"):
        config[name] = small[name]
    config.target.num_layers = 2
    config.joint_training = small.target_training
    config.heads_training = small.drafter_training
    config.layerskip.draft_length = config.medusa2.draft_length = 2
    config.prompt_length, config.new_tokens, config.timed_prompts = 8, 12, 2
    results = joint_training.run(config, workdir)["results"]
    assert [row["model"] for row in results["models"]] == ["plain target", "layerskip", "medusa2"]
    assert all(row["bits_per_byte"] > 0 for row in results["models"])
    assert all(row["block_efficiency"] >= 1 for row in results["models"][1:])
    assert {(row["drafter"], row["verifier"]) for row in results["rows"]} == {
        ("none", "greedy"), ("none", "token"), *((name, rule) for name in ("layerskip", "medusa2")
                                                 for rule in ("greedy", "token", "block"))
    }  # fmt: skip
    joint_training.run(config, workdir)
    out = capsys.readouterr().out
    assert all(f"{stage}: finished earlier, reused" in out for stage in ("layerskip", "medusa1", "medusa2"))


def test_an_unknown_method_is_named(tmp_path):
    config = joint_config.get_config()
    config.methods = ("medusa3",)
    with pytest.raises(ValueError, match="methods must be some of layerskip, medusa2; got medusa3"):
        joint_training.run(config, tmp_path)
