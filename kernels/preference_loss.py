"""``linear_preference_loss``: a loss of each pair of responses under a head, from their log-probabilities."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.checks import LARGEST, Checker, check_head, check_values, read_bounds
from kernels.chunked import Span, loss_pass
from kernels.dispatch import resolve
from kernels.head import Problem, RowGradients, Statistics
from kernels.loss_ops import collects_its_gradients, differences, fake_ticket, gradients_needed, leave
from kernels.ops import GIB, as_needs, fake_columns, head_arguments, running_on
from kernels.preference import PREFERENCE_LOSSES, Pairs, PreferenceSpec, pair_coefficients


class PreferenceLossOutput(NamedTuple):
    """What :func:`linear_preference_loss` gives. Only ``loss`` has a gradient; ignored rows hold 0."""

    loss: Tensor
    """fp32 scalar, Σ pair_weights · loss."""
    logprobs: Tensor
    """fp32 ``[T]``, of the policy being trained, nats."""
    chosen_rewards: Tensor
    """fp32 ``[pairs]``, β·Σ(new − ref) over the chosen response."""
    rejected_rewards: Tensor
    """fp32 ``[pairs]``, the same over the rejected response."""
    margins: Tensor
    """fp32 ``[pairs]``, chosen − rejected reward; above 0 the pair is told apart rightly."""
    entropy: Tensor
    """fp32 ``[T]``, nats."""
    losses: Tensor
    """fp32 ``[pairs]``, pair_weights · loss of each pair, whose sum ``loss`` is."""


def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cu_seqlens: Tensor,
    ref_logprobs: Tensor,
    pair_weights: Tensor,
    loss: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> PreferenceLossOutput:
    """Σ over pairs of pair_weights · loss of the DPO family, with its gradients made during the forward pass.

    The formulas, with their sources, are in :func:`kernels.preference.pair_coefficients`; log-probabilities are summed
    over a response. Pairs without weight, and ignored rows, take no part in the gradient's products. A pair whose rows
    do not fit the workspace makes all rows be scanned twice. The backward pass only multiplies by the upstream scalar,
    in place, and so runs once.

    Args:
        hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend: as in
            :func:`linear_logprob`. Differentiable in hidden, weight and bias.
        cu_seqlens: ``[2·pairs + 1]`` int32 or int64, bounds in rows of ``hidden`` of the responses chosen, rejected,
            chosen, rejected, …; a response may be empty. Chunks are planned from it on the host: on the CPU that costs
            nothing, on hidden's device the call reads it back once.
        ref_logprobs: ``[T]``, of the reference policy; a constant.
        pair_weights: ``[pairs]``.
        loss: ``"sigmoid"`` (DPO), ``"ipo"`` or ``"hinge"``.
        beta: β, above 0.
        label_smoothing: ε, the share of labels taken to be wrong (cDPO), 0 to below 0.5; with ``"sigmoid"`` only.

    Returns:
        PreferenceLossOutput: the loss and detached metrics.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_policy_loss`; cu_seqlens' values are always checked.
    """
    check = Checker("linear_preference_loss")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend)
    spec = PreferenceSpec(loss, beta, label_smoothing)
    _check(check, spec, len(hidden), hidden.device, cu_seqlens, ref_logprobs, pair_weights)
    total, logprobs, entropy, chosen, rejected, losses, _ = preference_loss_op(
        *head_arguments(hidden, weight, bias, targets, temperature), cu_seqlens, ref_logprobs.detach(),
        pair_weights.detach(), *spec, softcap, ignore_index, gradients_needed(hidden, weight, bias),
        workspace_gib * GIB, backend,
    )  # fmt: skip
    return PreferenceLossOutput(total, logprobs, chosen, rejected, chosen - rejected, entropy, losses)


def _check(
    check: Checker,
    spec: PreferenceSpec,
    count: int,
    device: torch.device,
    cu_seqlens: Tensor,
    ref_logprobs: Tensor,
    pair_weights: Tensor,
) -> None:
    """Check a preference loss's settings and data."""
    check.choice("loss", spec.loss, PREFERENCE_LOSSES)
    check.number("beta", spec.beta, "a number above 0", 1 / LARGEST)
    check.number("label_smoothing", spec.label_smoothing, "a number from 0 to below 0.5", 0)
    check.require(spec.label_smoothing < 0.5, "label_smoothing", spec.label_smoothing, "a number from 0 to below 0.5")
    fits = spec.loss == "sigmoid" or spec.label_smoothing == 0
    check.require(fits, "label_smoothing", spec.label_smoothing, '0 without loss="sigmoid"')
    check.row("ref_logprobs", ref_logprobs, count, device)
    check.bounds("cu_seqlens", cu_seqlens, device)
    check.require(
        len(cu_seqlens) % 2 == 1, "cu_seqlens", cu_seqlens, "[2·pairs + 1]: chosen, rejected, chosen, rejected, …"
    )
    check.row("pair_weights", pair_weights, len(cu_seqlens) // 2, device)


@torch.library.custom_op("tandem::linear_preference_loss", mutates_args=())
def preference_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    cu_seqlens: Tensor,
    ref_logprobs: Tensor,
    pair_weights: Tensor,
    loss: str,
    beta: float,
    label_smoothing: float,
    softcap: float | None,
    ignore_index: int,
    needs: list[bool],
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`kernels.linear_preference_loss`; gives loss, log-probabilities, entropies, rewards, losses, ticket."""
    check_values("linear_preference_loss", targets, len(weight), ignore_index, inverse_temperature)
    module = resolve("linear_preference_loss", hidden.device, backend)
    spec = PreferenceSpec(loss, beta, label_smoothing)
    bounds = read_bounds("linear_preference_loss", cu_seqlens, len(hidden))
    with running_on(hidden.device):
        ref_logprobs = ref_logprobs.float()
        problem = Problem.of(
            hidden, weight, bias, targets, inverse_temperature, softcap, ignore_index, logprob_guess=ref_logprobs,
            entropy_gradient=False,
        )  # fmt: skip
        lengths = torch.tensor(differences(bounds), dtype=torch.int64).to(hidden.device, non_blocking=True)
        pairs = Pairs(problem.valid, ref_logprobs, pair_weights.float(), lengths)

        def bind(found: Statistics, span: Span) -> tuple[tuple[Tensor, ...], RowGradients]:
            *columns, dlogprob = pair_coefficients(spec, found.logprobs, pairs.span(*span))
            return tuple(columns), RowGradients(dlogprob, None)

        found, columns, gradients = loss_pass(
            module, problem, differences(bounds[::2]), bind, as_needs(needs), workspace
        )  # fmt: skip
        pair_loss, chosen, rejected = columns
        ticket = leave(module, gradients)
    return pair_loss.sum(), found.logprobs, found.entropy, chosen, rejected, pair_loss, ticket


@preference_loss_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    cu_seqlens: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    rows, pairs = hidden.shape[0], cu_seqlens.shape[0] // 2
    columns = fake_columns(hidden, *[(size, torch.float32) for size in (rows, rows, pairs, pairs, pairs)])
    return hidden.new_empty((), dtype=torch.float32), *columns, fake_ticket()


collects_its_gradients(preference_loss_op)
