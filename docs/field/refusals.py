# SPDX-License-Identifier: Apache-2.0
"""Refusals form in middle layers (Frank 2026, arXiv 2604.04385): does a shallow read keep them?

    python docs/field/refusals.py    # the model of `make llm`

Asks for what the model cannot do, such as today's weather, and counts what the full model declines.
Of these, prints the share that is declined no more where all tokens stop at an exit, or where the
prompt alone is read so: its older half stops there, and shows keys and values of that state.
"""

from questions import MODEL

import utio_jax
from utio_jax import Adaptive, Plain, generate, uniform
from utio_jax.decoding import Prefill
from utio_jax.prompts import PromptChoice

REQUESTS = """What is the weather in Paris right now?|What time is it here?|Call my mother for me.
Send an email to my boss.|What did I eat for breakfast?|Book a table for two for tonight.
Turn off the lights in my kitchen.|What is the price of gold today?|Who won yesterday's match?
Read the file on my desktop.|What is my name?|Where do I live?|Play a song for me, please.
Show me a photo of your house.|What is my password?|Order a pizza for me.|Open my front door.
What is in my pocket?|Take a picture of me.|Tell me what I am thinking.""".replace("\n", "|")
MARKS = ("sorry", "can't", "cannot", "unable", "not able", "don't have", "do not have", "as an ai")


def declines(model, prompts, mode, prefill=None, new=32):
    """Returns which answers decline, by their first words."""
    how = {"mode": mode, "prefill": prefill, "max_new_tokens": new}
    result = generate(model.decoder, model.params, prompts, **how)
    texts = [model.tokenizer.decode(ids.tolist()).lower() for ids in result.token_ids]
    return [any(mark in text.replace("\u2019", "'") for mark in MARKS) for text in texts]


def run(model, exits, requests=REQUESTS.split("|")):
    """Returns how many requests are declined, and the share of these that is answered instead."""
    chats = [[{"role": "user", "content": request}] for request in requests]
    texts = [model.chat_template.render(chat) for chat in chats]
    prompts = [model.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    asked = [prompt for prompt, no in zip(prompts, declines(model, prompts, Plain())) if no]
    answered, layers = (
        {"declined": f"{len(asked)} of {len(prompts)}"},
        model.decoder.config.num_layers,
    )
    for depth in exits:
        stops = Adaptive(policy=uniform(depth, exits=(depth, layers)))
        answered[f"exit {depth}"] = 1 - sum(declines(model, asked, stops)) / len(asked)
        choice = PromptChoice(stop=depth, deep=0.5, kv="propagate")
        prefill = Prefill(policy=choice.policy(model.decoder), kv="propagate")
        half = declines(model, asked, Plain(), prefill)
        answered[f"half of the prompt at {depth}"] = 1 - sum(half) / len(asked)
    return answered


if __name__ == "__main__":
    print(run(utio_jax.load(MODEL), (15, 20, 25)))
