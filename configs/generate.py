"""Text from a pretrained model: one prompt, a file of prompts, or a chat in the terminal; drafted, and losslessly so.

    python launch.py --config configs/generate.py --config.model=PATH --config.prompt="Write quicksort in Python."
    python launch.py --config configs/generate.py --config.model=PATH --config.file=prompts.jsonl --config.batch_size=4
    python launch.py --config configs/generate.py --config.model=PATH --config.colour

PATH is a Hugging Face folder, a .gguf file, or the name of a model on the hub. Without a prompt and a file it is a
chat: /help names its commands; Ctrl-C ends an answer and keeps what there is of it, at the prompt it ends the chat.
The text goes to standard output, everything else to standard error.

Cost: the model is read in seconds; the first text waits for compilation, later runs take that from the cache.
Expect: the target's own text, whatever drafts, and under each a line with tokens per second and τ.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "generate_text"
    config.seed = 0
    config.model = ""
    config.dtype = ""  # "float32", "bfloat16"; empty: that of a Hugging Face folder, float32 for a .gguf file

    config.mode = ""  # "prompt", "file" or "chat"; empty: by which of the next two is set
    config.prompt = ""
    config.file = ""  # .jsonl: prompt, messages, turns or conversations; any other: one prompt per line
    config.on_broken = "stop"  # at a line that is broken or that the model cannot take; "skip" goes on without it
    config.batch_size = 1  # prompts of a file decoded together; 1 streams them
    config.raw = False  # continue the prompt as plain text, without the chat template
    config.system = ""  # system message

    # "none", "ngram", "suffix", "saved" (path: a trained drafter's folder), "eagle_suffix" (path: that of an EAGLE
    # chain, which copies what repeats, as suffix matching does) or "independent" (path: a smaller model with
    # the same tokenizer). Without a draft length a saved drafter keeps its own, and the others draft 8 or 4 tokens.
    # The longest match is 3 tokens for n-grams and 16 for suffixes.
    config.drafter = ConfigDict(dict(kind="ngram", path=""))
    config.drafter.draft_length = config_dict.placeholder(int)
    config.drafter.max_match = config_dict.placeholder(int)
    config.verifier = ""  # empty: greedy at temperature 0, else token; multi_round for trees

    config.sampling = ConfigDict(dict(temperature=0.0))
    config.sampling.top_k = config_dict.placeholder(int)
    config.sampling.top_p = config_dict.placeholder(float)
    config.sampling.min_p = config_dict.placeholder(float)
    config.penalties = ConfigDict(dict(banned_ids=()))
    for name in ("repetition", "presence", "frequency"):
        config.penalties[name] = config_dict.placeholder(float)
    config.penalties.min_new_tokens = config_dict.placeholder(int)
    config.max_new_tokens = 256
    config.stop = ()  # strings that end a text, as in --config.stop="('User:',)"

    config.html = ""  # of one prompt: a page with p, q and the acceptance of every draft, written to this file
    config.colour = False  # tokens in the colour of their origin, in a terminal
    config.rounds_per_piece = 1  # target calls between two pieces of streamed text
    return config
