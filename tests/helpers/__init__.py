# SPDX-License-Identifier: Apache-2.0
"""What tests share. Tests import from here, never from each other."""
