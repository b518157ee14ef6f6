# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin: prompts that stop at a layer, with the KV maps of `utio-jax fit-prompt`.

Installed as the top-level package `utio_jax_vllm`, so that vLLM's processes import no JAX. See
docs/contrib/vllm.md for the flags that turn it on; without them vLLM runs its own classes.
"""

ARCHITECTURE = "UtioLlamaForCausalLM"


def register() -> None:
    """Names the model class to vLLM, by entry point `vllm.general_plugins`; loads nothing."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
