"""Text from a pretrained model in the terminal: one prompt, a file of prompts, or a chat."""

import dataclasses
import functools
import json
import pathlib
import signal
import time
from typing import Any

from ml_collections import ConfigDict

from experiments.generation_settings import (
    as_prompt,
    make_drafter,
    mode_of,
    options_of,
    read_prompts,
    usable_prompts,
)
from experiments.terminal import Terminal
from specjax.decoding import Decoder
from specjax.pretrained import Chat, Pretrained, TextGeneration, TextStream, load, text_seeds
from specjax.report.environment import environment
from specjax.report.html import spelling, write_html
from specjax.report.metrics import CountTable, block_efficiency, ratio
from specjax.report.results import comparison_row
from specjax.report.trace import record_trace
from specjax.report.writer import write_report
from specjax.training.interrupts import Interrupts

COMMANDS = {
    "/help": "/reset forgets the conversation; /quit, the end of input or Ctrl-C here end it; Ctrl-C ends an answer",
    "/reset": "the conversation is forgotten",
}


@dataclasses.dataclass
class Record:
    """What was generated, for the report.

    Attributes:
        texts: (prompt, result) in order.
        prefill_seconds, decode_seconds: over all batches.
        batch: most texts decoded together.
        decoder: of the last batch; all are alike.
    """

    texts: list[tuple[Any, TextGeneration]] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    batch: int = 0
    decoder: Decoder | None = None

    def add(self, prompts: list, results: list[TextGeneration], decoder: Decoder) -> None:
        """One batch."""
        self.texts += zip(prompts, results, strict=True)
        self.prefill_seconds += results[0].prefill_seconds
        self.decode_seconds += results[0].decode_seconds
        self.batch, self.decoder = max(self.batch, len(results)), decoder

    @property
    def counts(self) -> CountTable:
        return CountTable.concatenate(result.counts for _, result in self.texts)

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.counts.emitted.sum(), self.decode_seconds)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Generates what the config asks for, shows it, and writes the report also after an interruption."""
    begin = time.perf_counter()
    mode, options = mode_of(config), options_of(config)
    terminal = Terminal(config.colour)
    prompts, left_out = [("", as_prompt(config, config.prompt))], []
    if mode == "file":
        prompts, left_out = read_prompts(config, terminal.say)
    model = load(config.model, config.dtype or None)
    if not config.raw and model.chat_template is None:
        raise ValueError(f"{model.name} has no chat template; --config.raw continues the prompt as plain text")
    options["drafter"] = make_drafter(config.drafter, model)
    if mode == "file":
        prompts, refused = usable_prompts(config, model, prompts, options)
        left_out += refused
    for line in left_out:
        terminal.say(f"skipped: {line}")
    load_seconds = time.perf_counter() - begin
    size = f"{model.model.num_params:,} parameters, {model.model.config.dtype}"
    terminal.say(f"{model.name}: {size}, loaded in {load_seconds:.1f} s")

    record = Record()
    if mode == "chat":
        interrupts = chat(config, model, options, terminal, record)
    else:
        interrupts = continue_all(config, model, prompts, options, terminal, record)
    first_text_seconds = terminal.first_text and terminal.first_text - begin
    report = write(config, workdir, record, left_out, load_seconds, first_text_seconds)
    if len(record.texts) > 1 and record.counts.rounds.sum():
        speed, tau = record.tokens_per_second, block_efficiency(record.counts)
        terminal.say(
            f"[{record.counts.emitted.sum()} tokens in {len(record.texts)} texts, {speed:.1f} tokens/s, τ {tau:.2f}]"
        )
    if terminal.closed:
        terminal.say("nobody reads the output any more; what was written until then is in the report")
    if config.html and interrupts.received is None:
        write_page(config, model, prompts[0][1], options)
        terminal.say(f"page: {config.html}")
    terminal.say(f"report: {workdir / 'report.md'}   texts: {workdir / 'texts.jsonl'}")
    interrupts.leave()
    return report


def continue_all(
    config: ConfigDict, model: Pretrained, prompts: list, options: dict, terminal: Terminal, record: Record
) -> Interrupts:
    """Every prompt in turn, streamed where a batch is one; Ctrl-C or a closed output ends it, what there is is kept."""
    names, texts = (list(column) for column in zip(*prompts, strict=True))
    done, interrupts = 0, Interrupts()
    try:
        for batch in model.batches(texts, seed=config.seed, batch_size=config.batch_size, **options):
            here = slice(done, done + len(batch.results()))
            try:
                if here.stop - here.start == 1:
                    if names[done]:
                        terminal.say(names[done])
                    _, interrupts = terminal.stream(functools.partial(TextStream, batch, config.rounds_per_piece))
                else:
                    interrupts = terminal.finish_batch(batch, names[here])
            finally:  # a third Ctrl-C, while what there is was shown
                record.add(texts[here], batch.results(), batch.decoder)
                batch.close()
            done = here.stop
            if interrupts.received is not None or terminal.closed:
                break
    except KeyboardInterrupt:  # between two texts, or a third one
        interrupts.received = signal.SIGINT
    return interrupts


def chat(config: ConfigDict, model: Pretrained, options: dict, terminal: Terminal, record: Record) -> Interrupts:
    """Line by line until the end of input, /quit, or Ctrl-C at the prompt."""
    talk = None if config.raw else model.chat(config.system or None, seed=config.seed, **options)
    interrupts = Interrupts()
    try:
        while interrupts.received is not signal.SIGTERM and not terminal.closed:
            try:
                line = terminal.ask()
                command = line and line.strip()
                if line is None or command == "/quit":
                    break
                if command == "/reset" and talk is not None:
                    talk.reset()
                if command in COMMANDS:
                    terminal.say(COMMANDS[command])
                elif command:
                    begin = functools.partial(_begin, config, model, options, talk, line, len(record.texts))
                    stream, interrupts = terminal.stream(begin)
                    record.add([line], [stream.result()], stream.decoder)
            except ValueError as error:
                terminal.say(f"not answered: {error}")
    except KeyboardInterrupt:
        interrupts = Interrupts()
    return interrupts if interrupts.received is signal.SIGTERM else Interrupts()


def _begin(
    config: ConfigDict, model: Pretrained, options: dict, talk: Chat | None, line: str, number: int
) -> TextStream:
    """The answer to a line of a chat; without one, the line is continued by itself."""
    if talk is not None:
        return talk.stream(line, config.rounds_per_piece)
    (seed,) = text_seeds(config.seed, 1, first=number)
    return model.stream(line, seed=[seed], rounds_per_piece=config.rounds_per_piece, **options)


def write_page(config: ConfigDict, model: Pretrained, prompt: Any, options: dict) -> None:
    """The same generation once more, a round at a time, as a page."""
    (seed,) = text_seeds(config.seed, 1)
    trace = record_trace(model.model, model.prompt_ids(prompt), seed=[seed], **model.decoding_options(**options))
    write_html(config.html, trace, spelling(model.tokenizer), title=model.name)


def write(
    config: ConfigDict,
    workdir: pathlib.Path,
    record: Record,
    left_out: list[str],
    load_seconds: float,
    first_text_seconds: float | None,
) -> dict:
    """report.json, report.md, and texts.jsonl with every prompt and its text."""
    with open(workdir / "texts.jsonl", "w", encoding="utf-8") as file:
        for prompt, result in record.texts:
            entry = {"prompt": prompt, "text": result.text, "finish": _finish(result)}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    texts = [
        {
            "text": number,
            "prompt_tokens": result.prompt_tokens,
            "reused_tokens": result.reused_tokens,
            "emitted_tokens": len(result.tokens),
            "finish": _finish(result),
            "stop_string": result.stop_string,
            "block_efficiency": result.block_efficiency,
            "tokens_per_second": result.tokens_per_second,
            "prefill_seconds": result.prefill_seconds,
            "decode_seconds": result.decode_seconds,
        }
        for number, (_, result) in enumerate(record.texts)
    ]
    return write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(),
        results={
            "rows": [_row(config, record)] if record.texts else [],
            "texts": texts,
            "left_out": [{"reason": line} for line in left_out],
            "load_seconds": load_seconds,
            "first_text_seconds": first_text_seconds,
        },
    )


def _row(config: ConfigDict, record: Record) -> dict:
    drafter, verifier = record.decoder.drafter, record.decoder.verifier
    return comparison_row(
        drafter=config.drafter.kind,
        objective=None,
        verifier=verifier.name,
        lossless=verifier.lossless,
        temperature=config.sampling.temperature,
        batch=record.batch,
        draft_length=drafter.draft_length,
        counts=record.counts,
        tokens_per_second=record.tokens_per_second,
        model=config.model,
        texts=len(record.texts),
        prefill_seconds=record.prefill_seconds,
        decode_seconds=record.decode_seconds,
    )


def _finish(result: TextGeneration) -> str:
    return "interrupted" if result.finish == "running" else result.finish
