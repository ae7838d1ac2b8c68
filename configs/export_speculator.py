r"""A trained drafter in the layout that vLLM serves: EAGLE, EAGLE-3, Medusa and block heads.

    python launch.py --config configs/export_speculator.py --workdir runs/export --config.model=PATH \
        --config.drafter=runs/smollm2/stages/drafter_eagle3/drafter \
        --config.target_name=HuggingFaceTB/SmolLM2-135M-Instruct

PATH is the target that the drafter was trained for. --config.target_name is what the file calls it, for the server to
find it: a name on the hub, or a path. A block head needs --config.mask_token_id, a token that no text contains.

Cost: seconds. Expect: runs/export/speculator with config.json and model.safetensors, read back and bit for bit the
drafter that was given. What the layout cannot say is refused by name; heads of configs/smollm2.py can be saved.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "export_speculator"
    config.model = ""
    config.drafter = ""
    config.target_name = ""
    config.mask_token_id = config_dict.placeholder(int)
    return config
