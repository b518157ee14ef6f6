# SPDX-License-Identifier: Apache-2.0
"""GGUF files in. Needs the extra `gguf`.

`header` checks a file before anything of it is used, `architectures` says what its keys and tensors
mean, `weights` dequantises them, `tokenizer` makes its tokenizer.
"""
