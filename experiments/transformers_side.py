"""The transformers library as the other side of a comparison: logits and greedy texts of a folder's weights.

Needs requirements-compare.txt; nothing else here imports torch.
"""

import dataclasses
import os
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


@dataclasses.dataclass
class Clock(StoppingCriteria):
    """Never stops anything; keeps the time and the length of the text after every call of the target."""

    times: list[float] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TransformersModel:
    """A model of the library on `threads` CPU threads.

    Args:
        path: Hugging Face folder.
        dtype: name, "float32" or "bfloat16".
        threads: of torch, for the whole process.
    """

    def __init__(self, path: str | os.PathLike, dtype: str, threads: int):
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, dtype)).eval()
        # The folder's own may ask for sampling or penalties.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def logits(self, ids: Sequence[int], chunk: int = 256) -> Iterator[np.ndarray]:
        """[chunk, V] float32 logits behind every token of a text, in order, read through the cache."""
        cache = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode():
            for begin in range(0, len(ids), chunk):
                part = torch.tensor([list(ids[begin : begin + chunk])])
                yield self.model(part, cache=cache, use_cache=True).logits[0].float().numpy()

    def greedy(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        *,
        prompt_lookup: int | None = None,
        assistant: "TransformersModel | None" = None,
    ) -> dict[str, Any]:
        """The continuation at temperature 0: plain, by prompt lookup, or with an assistant.

        Returns:
            {"tokens": new ids, "seconds": behind the first call of the target, "timed_tokens": emitted in them,
            "prefill_seconds": up to the end of that call, "target_calls"}
        """
        clock, prompt = Clock(), torch.tensor([list(ids)])
        options: dict[str, Any] = {"eos_token_id": sorted(stop_ids) or None, "pad_token_id": 0}
        if prompt_lookup is not None:
            options["prompt_lookup_num_tokens"] = prompt_lookup
        if assistant is not None:
            options["assistant_model"] = assistant.model
        begin = time.perf_counter()
        with torch.inference_mode():
            text = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
                **options,
            )
        end = time.perf_counter()
        tokens = text[0, len(ids) :].tolist()
        return {
            "tokens": tokens,
            "seconds": end - clock.times[0],
            "timed_tokens": len(ids) + len(tokens) - clock.lengths[0],
            "prefill_seconds": clock.times[0] - begin,
            "target_calls": len(clock.times),
        }
