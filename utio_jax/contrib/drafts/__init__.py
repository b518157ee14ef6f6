# SPDX-License-Identifier: Apache-2.0
"""Drafts at exits that are chosen while decoding (DEL), and gates on likely tokens (SpecEE)."""

from utio_jax.contrib.drafts.candidates import CandidateGates, fit_candidates
from utio_jax.contrib.drafts.exits import Agreement, DynamicExits

__all__ = ["Agreement", "CandidateGates", "DynamicExits", "fit_candidates"]
