# SPDX-License-Identifier: Apache-2.0
"""Guardrails: whether routing can pay at a shape at all, asked before a pass.

Of the cost model in FLOPs; and of measured times, where a benchmark has written them down.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from utio_jax.accounting.profit import Profit, predict_seconds
from utio_jax.accounting.step_profit import expected_step_depth, predict_step
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.files import conditions
from utio_jax.core.flops import expected_flops, token_cost
from utio_jax.policies.base import Policy
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches


def check_worthwhile(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    policy: Policy,
    *,
    batch: int,
    width: int,
    executor: Executor = MicroBatches(),
    fractions: Sequence[float] | None = None,
    min_tokens: int = 0,
    profit: Profit | None = None,
) -> str | None:
    """Returns why routing cannot pay at a shape, or None where it can.

    Args:
      decoder: the model.
      params: its parameters.
      policy: what would route.
      batch: rows.
      width: tokens per row.
      executor: how it would run.
      fractions: expected share of tokens at each of the policy's depths; by default the best case,
        in which everybody stops at the first.
      min_tokens: smallest pass that is routed at all.
      profit: times that `utio-jax bench` measured of this model on this device: routing must also
        be predicted to be faster than the fastest full pass. None asks about FLOPs alone.

    Raises:
      ValueError: `profit` is of another model, device or dtype.
    """
    if batch * width < min_tokens:
        return f"{batch} x {width} tokens are fewer than the minimum of {min_tokens}"
    cost = token_cost(decoder, params)
    shares = fractions if fractions is not None else [1.0] + [0.0] * (len(policy.depths) - 1)
    layers = decoder.config.num_layers
    expected = partial(
        expected_flops, cost, batch=batch, width=width, min_bucket=executor.min_bucket
    )
    full = expected(depths=(layers,), fractions=(1.0,))
    boundaries = range(len(policy.depths) - 1)
    routed = expected(
        depths=policy.depths,
        fractions=shares,
        gates=[policy.flops(index, decoder, params) for index in boundaries],
        reads=[policy.reads_logits(index) for index in boundaries],
    )
    at = f"at {batch} x {width} tokens in buckets of {executor.min_bucket} routing would"
    if policy.depths == (layers,):
        return None
    if routed >= full:
        return f"{at} cost {routed / full:.2f} of the full pass' FLOPs"
    if profit is None:
        return None
    check_profit(profit, decoder, params)
    seconds, seconds_full = predict_seconds(
        profit,
        dict(zip(policy.depths, shares, strict=True)),
        batch=batch,
        context=width,
        executor=executor,
        gates=[policy.flops(index, decoder, params) for index in boundaries],
        reads=[policy.reads_logits(index) for index in boundaries],
    )
    if seconds < seconds_full:
        return None
    return f"{at} take {seconds / seconds_full:.2f} of the full pass' time, by measured rates"


def check_decoding(
    decoder: Decoder,
    params: Params,
    policy: Policy,
    *,
    batch: int,
    fractions: Sequence[float],
    profit: Profit,
) -> str | None:
    """Returns why a depth per token is predicted not to pay in decoding, or None where it is.

    Args:
      decoder: the model.
      params: its parameters.
      policy: what would route.
      batch: rows that step together.
      fractions: expected share of tokens at each of the policy's depths.
      profit: times that `utio-jax bench` measured of this model on this device.

    Raises:
      ValueError: `profit` is of another model, device or dtype, or has no steps of such a batch.
    """
    check_profit(profit, decoder, params)
    histogram = dict(zip(policy.depths, fractions, strict=True))
    routed, plain = predict_step(profit.steps, histogram, batch)
    if routed < plain:
        return None
    return (
        f"{batch} rows that step together would run {expected_step_depth(histogram, batch):.1f} of "
        f"{decoder.config.num_layers} layers, and take {routed / plain:.2f} of the plain model's "
        "time, by measured rates"
    )


def check_profit(profit: Profit, decoder: Decoder, params: Params) -> None:
    """Raises ValueError where times were measured of another model, device or dtype."""
    here = conditions(params)
    ours = (token_cost(decoder, params), decoder.config.num_layers, here["device"], here["dtype"])
    theirs = (profit.cost, profit.num_layers, profit.device, profit.dtype)
    if ours != theirs:
        raise ValueError(
            "Wanted times measured of this model on this device. Got those of "
            f"{profit.num_layers} layers, {profit.dtype} on {profit.device}; here it is "
            f"{decoder.config.num_layers} layers, {here['dtype']} on {here['device']}, or another "
            "width. Measure them: utio-jax bench --suite cpu."
        )
