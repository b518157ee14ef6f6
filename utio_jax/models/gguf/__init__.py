# SPDX-License-Identifier: Apache-2.0
"""GGUF files: header, architectures, weights, tokenizer. Needs the extra `gguf`."""
