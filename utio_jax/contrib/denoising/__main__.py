# SPDX-License-Identifier: Apache-2.0
"""Prints the text after a prompt: `python -m utio_jax.contrib.denoising FOLDER PROMPT [TOKENS]`."""

import sys

from utio_jax.contrib.denoising.loading import load_denoiser

if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"Wanted FOLDER PROMPT [TOKENS]. Got {sys.argv[1:]}.")
    folder, prompt, *count = sys.argv[1:]
    try:
        model = load_denoiser(folder)
        print(model.generate(prompt, max_new_tokens=int(*count) if count else 64)[0])
    except ValueError as error:
        sys.exit(f"denoising: {error}")
