r"""specjax beside transformers on the same weights: agreement, speed, time to the first token, memory.

    python3 -m venv .venv-compare
    .venv-compare/bin/pip install -r requirements.txt -r requirements-compare.txt
    .venv-compare/bin/python launch.py --config configs/compare_transformers.py --workdir runs/compare \
        --config.model=PATH

PATH is a Hugging Face folder, a .gguf file (written once as a float32 folder into the workdir, so that both read the
same numbers), or a name on the hub. --config.drafters="('ngram','saved')" with
--config.drafter_settings.saved.path=runs/smollm2/stages/drafter_eagle3/drafter adds a trained drafter, and the same
path with `eagle_suffix` one that also copies; --config.draft_model=PATH adds a smaller model of the same tokenizer, for
assisted generation there and as an independent drafter here.

Prompts are functions of the standard library in documents that configs/smollm2.py holds out. Everything is decoded at
temperature 0 and batch 1 on `threads` cores, in turns, on prompts given as token ids. Tokens per second leave out
reading the prompt on both sides, there with the first token, here without it.

Cost on 2 CPU cores with SmolLM2-135M: a timed text of 64 tokens takes 1 to 5 s; 336 of them (14 settings, 4 prompts, 5
repeats and a warm-up) took 17 minutes, the greedy texts 5 and all the rest 2. README has the figures of that run.
"""

from ml_collections import ConfigDict

from configs.spec_bench import drafter_settings


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "compare_transformers"
    config.seed = 0
    config.model = ""
    config.draft_model = ""
    config.threads = 2
    config.dtypes = ("float32", "bfloat16")

    config.drafters = ("ngram", "suffix")  # some of drafter_settings
    config.drafter_settings = drafter_settings()
    config.trained = ("saved",)  # of these, the ones whose τ is checked
    config.prompt_lookup = (10,)  # prompt_lookup_num_tokens there

    config.prompt_kinds = ("complete", "document")
    config.prompt_chars = 600  # of the code in a prompt
    config.held_out = 0.05
    config.timed_prompts = 4
    config.max_new_tokens = 64
    config.repeats = 5
    config.settle_seconds = 0.3  # before each timed text, until the other library's threads sleep

    config.logit_positions = 1000
    config.perplexity_tokens = 2048
    config.greedy_prompts = 20
    config.greedy_new_tokens = 128
    config.near_tie = ConfigDict(dict(float32=2e-3, bfloat16=0.5))  # logits closer than this may come in either order
    config.load_repeats = 3

    # (at least or at most, aim)
    config.expected = ConfigDict(
        dict(
            logit_difference=1e-3,
            perplexity_difference=1e-3,
            plain_float32=(2.0, 2.5),
            plain_fastest=(1.4, 2.0),
            speculative_same_dtype=(1.5, 2.5),
            speculative_fastest_plain=(1.2, 2.0),
            speculative_over_transformers=(2.0, 3.0),
            trained_block_efficiency=(2.2, 3.0),
            first_token_seconds=(15.0, 8.0),
            peak_over_weights=1.3,
        )
    )
    return config
