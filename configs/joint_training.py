"""Targets trained together with their drafter: LayerSkip from scratch, Medusa-2 on top of the plain target.

    python launch.py --config configs/joint_training.py --workdir runs/joint_training

The plain target is that of configs/quickstart.py; a finished runs/quickstart lends it, otherwise it is trained here.

Cost on 2 CPU cores with a lent target: 6 minutes.

Expect 2.28 and 2.29 bits per byte of the two targets (2.31 of the plain one); LayerSkip's own first layer as drafter: τ
3.2 and speed-up 1.4 at temperature 0, 3.0 and 1.2 at temperature 1; Medusa-2's chain of four heads: τ 1.9 and 0.8 by
the block rule at temperature 1, 0.6 at temperature 0.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    for name in ("drafters", "drafter", "distillation", "expected", "decoding"):
        del config[name]
    config.experiment = "joint_training"
    config.reuse = "runs/quickstart"  # a workdir whose finished stages may be used; "" for none
    config.methods = ("layerskip", "medusa2")
    config.layerskip = ConfigDict(dict(exit_layer=1, draft_length=3, max_drop=0.1, exit_scale=0.2))
    config.medusa2 = ConfigDict(dict(draft_length=4, heads_weight=0.2))

    config.heads_training = config.drafter_training.copy_and_resolve_references()
    del config.drafter_training
    config.joint_training = config.target_training.copy_and_resolve_references()
    config.joint_training.optimizer.learning_rate = 2e-4
    for training, steps in ((config.heads_training, 400), (config.joint_training, 300)):
        training.steps = steps
        training.eval_every = training.save_every = steps // 2
    config.heads_training.optimizer.learning_rate = 1e-3

    config.allowed_loss = 0.15  # bits per byte, against the plain target
    config.prompt_length, config.new_tokens, config.timed_prompts, config.repeats = 32, 64, 6, 5
    return config
