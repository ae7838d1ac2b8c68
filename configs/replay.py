"""Rules compared on identical drafts: rounds are recorded once, then every rule, γ and tree is scored without a model.

    python launch.py --config configs/replay.py --workdir runs/replay

Needs the models of a finished run, by default runs/quickstart.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "replay"
    config.seed = 7
    config.models = "runs/quickstart"  # the workdir of a training run
    config.drafter = "distilled"
    config.prompts = 24
    config.prompt_length = 32
    config.new_tokens = 48
    config.draft_length = 8
    config.draft_lengths = (1, 2, 3, 4, 5, 6, 7, 8)
    config.chain_rules = ("token", "block", "lossy_fixed_acceptance")
    config.tree_shape = (4, 1, 1)  # 12 nodes
    config.children = (1, 2, 3, 4)
    config.tree_rules = ("multi_round", "traversal", "k_sequential")
    return config
