r"""Speed by category over a file of prompts: τ, α, tokens per second and speed-up, each with an interval over prompts.

    python launch.py --config configs/spec_bench.py --workdir runs/spec_bench --config.model=PATH \
        --config.questions=question.jsonl

PATH is a Hugging Face folder, a .gguf file, or the name of a model on the hub. The questions are JSON Lines, one object
each: question_id, category and turns, as Spec-Bench (Xia et al. 2024, arXiv 2401.07851) publishes them, or any of the
other shapes that specjax.data.prompts reads. They are not part of this repository.

Another drafter: --config.drafters="('ngram','saved')" with its folder,
--config.drafter_settings.saved.path=runs/smollm2/stages/drafter_eagle3/drafter.
A stopped run goes on at the batch of prompts at which it was stopped. --config.prompts_per_category=0 takes all of
them, --config.turns=all asks the follow-up questions too.

Cost on 2 CPU cores with SmolLM2-135M in bfloat16: 13 prompts × 64 tokens under 3 settings, 3 repeats and a warm-up, 8
minutes. README has the figures of that run.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "spec_bench"
    config.seed = 0
    config.model = ""
    config.dtype = ""  # "float32", "bfloat16"; empty: that of a Hugging Face folder, float32 for a .gguf file

    config.questions = ""
    # At a line that is broken or that the chat template refuses; "skip" goes on without it and names it in the report.
    config.on_broken = "stop"
    config.categories = ()  # empty: all
    config.prompts_per_category = 2  # the first ones of the file; 0: all
    config.turns = "first"  # or "all": follow-up questions behind the target-only answer
    config.longest_prompt = 1024  # tokens; longer prompts are left out and listed

    config.drafters = ("ngram", "suffix")  # some of drafter_settings
    config.drafter_settings = drafter_settings()
    config.verifier = ""  # empty: greedy at temperature 0, else token; multi_round for trees
    config.temperature = 0.0
    config.max_new_tokens = 128
    config.repeats = 5  # of every answer, in turns with the target-only one
    config.prompts_per_stage = 4  # what a stop can cost
    config.near_tie = 0.01  # greedy texts may part where the target's best two logits are closer (bfloat16: 0.5)
    return config


def drafter_settings() -> ConfigDict:
    """The fields of one drafter, and what they are when left out, are those of configs/generate.py."""
    number = lambda: config_dict.placeholder(int)  # noqa: E731  (one that is shared takes all their values)
    kinds = ("ngram", "suffix", "saved", "eagle_suffix", "independent")
    return ConfigDict({kind: dict(kind=kind, path="", draft_length=number(), max_match=number()) for kind in kinds})
