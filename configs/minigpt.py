"""A textbook pair: a MiniGPT of 27 thousand parameters drafts for one of 203 thousand, on cyclic texts.

    python launch.py --config configs/minigpt.py --workdir runs/minigpt

Cost: 2 to 3 minutes on 2 CPU cores, most of it compilation; 50 seconds once the compiled programs are cached.
Expect: 26,772 and 202,644 parameters; losses of 0.0002 and 0.0003 after 30 epochs. On texts like those of the training
the two agree (α = 1.00): 20 tokens take 4 target calls at K = 4, and 3 at K = 6 and 8. α = 0.94 after a prompt of
unseen tokens, 0.83 with both at temperature 3, 0.77 with only the drafter there, 0.05 with an untrained drafter. In
wall clock all are slower than target-only decoding, 0.6 to 0.85 times its speed (untrained: 0.3 to 0.5).
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.experiment = "minigpt"
    config.seed = 42

    # Both models: sinusoidal positions, ReLU, norm after each sum, biases throughout.
    config.vocab_size = 20
    config.context_length = 64
    config.dropout = 0.1
    config.drafter = ml_collections.ConfigDict({"d_model": 32, "num_heads": 2, "num_layers": 2, "learning_rate": 0.01})
    config.target = ml_collections.ConfigDict({"d_model": 64, "num_heads": 4, "num_layers": 4, "learning_rate": 0.005})

    # Text i is i + 1, i + 2, ... modulo the pattern, so that the next token is always certain.
    config.num_sequences = 500
    config.sequence_length = 12
    config.pattern_length = 8
    config.epochs = 30
    config.batch_size = 32

    config.temperature = 1.0
    config.max_new_tokens = 20
    config.num_seeds = 64  # every figure is over this many runs of one prompt
    config.comparison_prompt = (2, 3)
    config.comparison_draft_length = 4
    config.sweep_prompt = (1, 2, 3)
    config.sweep_draft_lengths = (2, 3, 4, 5, 6, 8)
    config.scenario_draft_length = 4
    config.easy_prompt = (1, 2, 3, 4)
    config.unseen_prompt = (17, 11, 19, 14)  # tokens that no text holds
    config.high_temperature = 3.0
    return config
