"""Prompts that the target's template refuses stop the stage that gathers prompts, or are left out of it."""

import dataclasses
import json

import pytest

import specjax
from configs import smollm2 as smollm2_config
from experiments.answer_stage import prepare_prompts
from specjax.data.chat_template import ChatTemplate
from specjax.report.stages import Stages
from tests.experiments.tiny_generation import REFUSING, use_template, write_lines
from tests.experiments.tiny_pretrained import write_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"))
    use_template(folder, REFUSING)
    return specjax.load(folder)


@pytest.fixture
def config(tmp_path):
    """Of forty prompts, every fourth is refused, by turns for a word and for how it begins."""
    lines = [{"prompt": f"question {i}?"} for i in range(40)]
    lines[0::8] = [{"prompt": f"forbidden {i}"} for i in range(5)]
    beginning = {"role": "system", "content": "Be brief."}
    lines[4::8] = [{"messages": [beginning, {"role": "user", "content": f"request {i}"}]} for i in range(5)]
    config = smollm2_config.get_config()
    path = write_lines(tmp_path / "p.jsonl", *lines)
    config.prompts.update(sources=("files",), path=str(path), held_out=0.3, count=15, held_out_count=6, max_tokens=64)
    return config


def test_a_refused_prompt_is_named_and_stops(target, config, tmp_path):
    with pytest.raises(ValueError, match=r"^p.jsonl:\d+: the chat template failed \(.*'skip'$") as error:
        prepare_prompts(config, Stages(tmp_path), target)
    assert int(str(error.value).split(":")[1]) % 4 == 1


def test_refused_prompts_are_left_out_counted_and_said(target, config, tmp_path, capsys):
    config.prompts.on_broken = "skip"
    train, held_out = prepare_prompts(config, Stages(tmp_path), target)
    numbers = [int(prompt.name.split(":")[1]) for prompt in train + held_out]
    assert len(train) == 15 and len(held_out) == 6 and all(number % 4 != 1 for number in numbers)
    record = json.loads((tmp_path / "stages" / "prompts" / "result.json").read_text())["result"]
    out = capsys.readouterr().out
    refused = record["train"]["refused"] + record["held_out"]["refused"]
    assert 0 < refused <= 10 and "left out: p.jsonl:" in out and "the chat template failed" in out


def test_too_few_prompts_are_explained_by_those_that_were_refused(target, config, tmp_path):
    config.prompts.update(on_broken="skip", count=38)
    message = r"38 train prompts of at most 64 tokens .*, and there are \d+ \(\d+ were refused, the first: p.jsonl:"
    with pytest.raises(ValueError, match=message) as error:
        prepare_prompts(config, Stages(tmp_path), target)
    assert "\n" not in str(error.value)


def test_a_template_that_takes_no_user_alone_is_a_template_too(target, config, tmp_path):
    refuse = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    strict = dataclasses.replace(target, chat_template=ChatTemplate(refuse + "{{ messages[-1].content }}"))
    beginning = {"role": "system", "content": "Be brief."}
    lines = [{"messages": [beginning, {"role": "user", "content": f"request {i}"}]} for i in range(20)]
    config.prompts.update(path=str(write_lines(tmp_path / "system.jsonl", *lines)), count=1, held_out_count=1)
    train, held_out = prepare_prompts(config, Stages(tmp_path), strict)
    assert [len(side) for side in (train, held_out)] == [1, 1]
