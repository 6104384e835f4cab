"""A single-process run of the same prompts: plain Transformers `generate`, nothing of farfill's engine in it.

Run as `python -m farfill.cli.demo.reference`: a JSON job on standard input, a line of JSON for each answer
on standard output as soon as it is there.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reference:
    """What the model says to one prompt when nobody else is involved."""

    prompt_tokens: int
    text: str


def run_reference(
    model: str, dtype: str, threads: int, conversations: list[list[dict[str, str]]], max_tokens: int
) -> Iterator[Reference]:
    """Greedy answers, one conversation after the other."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    for messages in conversations:
        inputs: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = engine.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
        prompt_tokens = inputs["input_ids"].shape[1]
        text = tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True)
        yield Reference(prompt_tokens, str(text))


def main() -> None:
    job = json.load(sys.stdin)
    for one in run_reference(**job):
        print(json.dumps({"prompt_tokens": one.prompt_tokens, "text": one.text}), flush=True)  # noqa: T201 - its output


if __name__ == "__main__":
    main()
