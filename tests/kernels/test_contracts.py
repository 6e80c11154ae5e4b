import gc
import math
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import dispatch, loss_ops


class IntoOps(TorchDispatchMode):
    """Sees the operations inside Tandem's ops, which the dispatcher takes for one each."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tandem":
            with self:
                return OPDEFS[f"tandem::{function._opname}"]._init_fn(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        self.see(function, args, result)
        return result


class Record(IntoOps):
    """The largest result, in bytes, and the row counts of the products that make gradients."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.largest, self.product_rows = vocabulary, 0, 0

    def see(self, function, args, result):
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.nbytes)
        if function is torch.ops.aten.addmm_.default and args[2].shape[0] == self.vocabulary:
            self.product_rows += args[1].shape[0]  # dX += dz·W


def policy(run, problem, rows, **settings):
    device = problem.hidden.device
    defaults = {
        "advantages": torch.ones(rows, device=device),
        "token_weights": torch.ones(rows, device=device),
        "loss": "reinforce",
        "backend": run.backend,
    }
    return kernels.linear_policy_loss(problem.hidden, problem.weight, problem.targets, **(defaults | settings))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("gradients", [True, False])
def test_no_tensor_of_all_logits(run, tools, gradients, ratio):
    if run.interpreted or run.device == "cuda":
        pytest.skip("too slow in the interpreter; on a GPU the allocator is asked (test_large.py)")
    rows, vocabulary, width = 128, 5003, 8
    problem = tools.make_problem(rows, vocabulary, width=width, device=run.device)
    problem = problem.leaves() if gradients else problem
    bounds = torch.tensor([0, rows], device=run.device)  # a sequence too long for a chunk
    workspace = 0.001  # GiB: 50 rows' logits in fp32 and nothing beside them
    settings = {"backend": run.backend, "workspace_gib": workspace}
    with Record(vocabulary) as record:
        total = policy(run, problem, rows, entropy_coef=0.1, ratio=ratio, cu_seqlens=bounds, **settings).loss
        total = total + kernels.linear_logprob(**problem.arguments(), **settings).sum()
        if ratio == "sequence":
            bounds = torch.tensor([0, 70, rows], device=run.device)
            zeros, ones = torch.zeros(rows, device=run.device), torch.ones(1, device=run.device)
            total = (
                total
                + kernels.linear_preference_loss(
                    **problem.arguments(), cu_seqlens=bounds, ref_logprobs=zeros, pair_weights=ones, **settings
                ).loss
            )
        if run.has("linear_kl"):
            heads = problem.hidden, problem.weight, problem.hidden * 2, problem.weight
            total = total + kernels.linear_kl(*heads, **settings).sum()
        if gradients:
            total.backward()
    assert 4 * vocabulary * width <= record.largest <= workspace * 2**30


def test_without_gradients_64_mib_suffice(run, tools):
    if run.interpreted:
        pytest.skip("too slow in the interpreter")
    problem = tools.make_problem(4100, 5003, width=4, device=run.device)

    def once():
        kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend)

    once()  # Triton's own timing takes a buffer of 256 MiB
    with Record(5003) as record:
        once()
    assert record.largest <= 64 * 2**20


class Alive(IntoOps):
    """The most bytes alive at a time, of reserved tensors above a size."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.storages, self.most = least, [], 0

    def see(self, function, args, result):
        if function is torch.ops.aten.new_empty.default and result.nbytes >= self.least:
            gc.collect()  # Triton's interpreter leaves arguments in cycles
            self.storages = [one for one in self.storages if not one[0].expired()]
            self.storages.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            self.most = max(self.most, sum(size for _, size in self.storages))


def test_a_larger_chunk_comes_after_a_smaller_one(run, tools):
    """What was reserved for that is given back first."""
    if run.backend == "reference":
        pytest.skip("keeps fp32 logits of fewer rows")
    lengths = [22, 22, 24, 24, 26, 26]
    problem = tools.make_problem(sum(lengths), 1009, width=4, device=run.device, dtype=torch.bfloat16).leaves()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    workspace = 75 * 2 * 1016 / 2**30  # of one pair's E
    with Alive(int(workspace * 2**30 / 2)) as alive:
        kernels.linear_preference_loss(
            **problem.arguments(),
            cu_seqlens=bounds,
            ref_logprobs=torch.zeros(len(problem.hidden), device=run.device),
            pair_weights=torch.ones(3, device=run.device),
            workspace_gib=workspace,
            backend=run.backend,
        ).loss.backward()
    assert 0 < alive.most <= workspace * 2**30


@pytest.mark.parametrize("loss", ["clip", "reinforce"])
@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "behaviour_logprobs", "ref_logprobs"])
def test_what_a_row_without_weight_holds_reaches_nothing(run, tools, name, loss):
    problem = tools.make_problem(6, 127, device=run.device).leaves()
    names = ("advantages", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "token_weights")
    rows = {one: torch.linspace(-1, -0.5, 6, device=run.device) for one in names}
    rows["token_weights"][2] = 0
    settings = {"loss": loss, "kl_coef": 0.1, "is_cap": 2.0}

    def gradients():
        found = policy(run, problem, 6, **rows, **settings)
        return [found.loss, *torch.autograd.grad(found.loss, problem.inputs)]

    expected = gradients()
    for value in (torch.nan, -torch.inf):
        rows[name][2] = value
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True)), value


def test_dead_rows_get_nothing(run, tools):
    rows, vocabulary = 40, 127
    problem = tools.make_problem(rows, vocabulary, device=run.device).leaves()
    advantages = (torch.arange(rows, device=run.device) % 4 == 0).float()
    alive = (advantages != 0) & (problem.targets >= 0)
    workspace = tools.workspace_for(run, problem, 16)
    policy(run, problem, rows, advantages=advantages, workspace_gib=workspace).loss.backward()
    assert ((problem.hidden.grad != 0).any(1) == alive).all()
    problem.hidden.grad = None
    logprobs = kernels.linear_logprob(**problem.arguments(), backend=run.backend, workspace_gib=workspace)
    logprobs.backward(advantages)
    assert ((problem.hidden.grad != 0).any(1) == alive).all()
    problem.weight.grad = None
    policy(run, problem, rows, advantages=torch.zeros_like(advantages), workspace_gib=workspace).loss.backward()
    assert (problem.weight.grad == 0).all()


def test_dead_rows_are_not_multiplied(run, tools):
    if not run.keeps_logits():
        pytest.skip("multiplies on its own")
    rows, vocabulary = 64, 127
    problem = tools.make_problem(rows, vocabulary, device=run.device).leaves()
    advantages = (torch.arange(rows, device=run.device) % 4 == 0).float()
    live = int(((advantages != 0) & (problem.targets >= 0)).sum())
    workspace = tools.workspace_for(run, problem, 16)
    with Record(vocabulary) as record:
        policy(run, problem, rows, advantages=advantages, workspace_gib=workspace).loss.backward()
    assert record.product_rows == live

    with Record(vocabulary) as record:
        logprobs = kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend)
        logprobs.backward(advantages)
    assert record.product_rows == live

    clipped = torch.full((rows,), -50.0, device=run.device)  # ratios far above the clip with positive advantages
    with Record(vocabulary) as record:
        found = policy(run, problem, rows, advantages=torch.ones_like(clipped), loss="clip", old_logprobs=clipped)
    assert found.clipped[problem.targets >= 0].all() and record.product_rows == 0


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen_side_gets_no_gradient_work(run, tools, frozen):
    problem = tools.make_problem(32, 127, device=run.device).leaves()
    getattr(problem, frozen).requires_grad_(False)
    products = []

    class Products(IntoOps):
        def see(self, function, args, result):
            if function in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default):
                products.append(tuple(result.shape))

    with Products():
        loss = policy(run, problem, 32).loss
        logprobs = kernels.linear_logprob(**problem.arguments(), backend=run.backend)
        (loss + 2 * logprobs.sum()).backward()
    live = int((problem.targets >= 0).sum())
    if run.keeps_logits():
        assert products == [(live, 48) if frozen == "weight" else (127, 48)] * 2
    assert getattr(problem, frozen).grad is None
    other = problem.hidden if frozen == "weight" else problem.weight
    assert other.grad.abs().sum() > 0


def test_poisoned_dead_rows_stay_dead(run, tools):
    problem = tools.make_problem(32, 127, device=run.device).leaves()
    with torch.no_grad():
        problem.hidden[problem.targets < 0] = torch.nan
    assert (problem.targets < 0).any()
    found = policy(run, problem, 32, entropy_coef=0.1)
    found.loss.backward()
    kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend).sum().backward()
    assert found.loss.isfinite() and problem.weight.grad.isfinite().all() and problem.hidden.grad.isfinite().all()


def test_weight_swapped_out_between_the_passes(run, tools):
    """As ZeRO-3 does: after the forward pass the parameter's storage is gone, before the backward it is another."""
    problem = tools.make_problem(32, 127, device=run.device).leaves()
    weight = torch.nn.Parameter(problem.weight.detach().clone())
    full = weight.detach().clone()
    total = kernels.linear_logprob(problem.hidden, weight, problem.targets, backend=run.backend).sum()
    weight.data = torch.empty(0, device=run.device)
    weight.data = full
    total.backward()
    kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend).sum().backward()
    assert torch.equal(weight.grad, problem.weight.grad)


def test_policy_loss_needs_no_weight_in_backward_and_runs_it_once(run, tools):
    problem = tools.make_problem(32, 127, device=run.device).leaves()
    loss = policy(run, problem, 32).loss
    full, problem.weight.data = problem.weight.data, torch.empty(0, device=run.device)
    with pytest.raises(RuntimeError, match="backward runs once"):
        problem.weight.data = full
        loss.backward(retain_graph=True)
        assert problem.weight.grad.abs().sum() > 0
        loss.backward()


def test_gradients_are_handed_over_or_dropped_not_copied(run, tools):
    problem = tools.make_problem(32, 127, device=run.device).leaves()
    before = len(loss_ops._waiting.gradients)
    loss = policy(run, problem, 32).loss
    *_, (_, (_, dweight, _)) = loss_ops._waiting.gradients.values()
    place = dweight.data_ptr()
    del dweight  # a second reference would make autograd copy
    loss.backward()
    assert problem.weight.grad.data_ptr() == place
    assert len(loss_ops._waiting.gradients) == before
    loss = policy(run, problem, 32).loss
    assert len(loss_ops._waiting.gradients) == before + 1
    del loss
    assert len(loss_ops._waiting.gradients) == before, "a graph without a backward pass must free its gradients"


def test_autocast_does_not_reach_the_products(run, tools):
    problem = tools.make_problem(32, 127, device=run.device).leaves()

    def results():
        found = policy(run, problem, 32)
        return [found.logprobs, *torch.autograd.grad(found.loss, problem.inputs)]

    plain = results()
    with torch.autocast(run.device, dtype=torch.bfloat16):
        cast = results()
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


H, W, Y, T = torch.zeros(4, 8), torch.zeros(16, 8), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
HEAD = {"hidden": H, "weight": W, "targets": Y}
POLICY = HEAD | {"advantages": T, "token_weights": T, "old_logprobs": T}
BOUNDS = torch.tensor([0, 2, 4])
PAIRS = HEAD | {"cu_seqlens": BOUNDS, "ref_logprobs": T, "pair_weights": T[:1]}
KL = {"hidden_p": H, "weight_p": W, "hidden_q": H, "weight_q": W}
GAE = {"rewards": T, "values": T, "cu_seqlens": BOUNDS, "gamma": 1.0, "lam": 0.95}
NORM = {"residual": H, "branch": None, "weight": H[0], "eps": 1e-6}
ILLEGAL = [
    (kernels.linear_logprob, HEAD, {"hidden": H[None]}, r"hidden is \[1, 4, 8\] float32 on cpu, expected \[T, H\]"),
    (kernels.linear_logprob, HEAD, {"hidden": H.double()}, r"hidden is \[4, 8\] float64.*bfloat16"),
    (kernels.linear_logprob, HEAD, {"hidden": [1.0]}, "hidden is a list, expected a tensor"),
    (kernels.linear_logprob, HEAD, {"hidden": H.to_sparse()}, r"hidden is sparse \[4, 8\].*expected \[T, H\]"),
    (kernels.linear_logprob, HEAD, {"ignore_index": 1.5}, "ignore_index is 1.5, expected an integer"),
    (kernels.linear_logprob, HEAD, {"ignore_index": 2**70}, "ignore_index is .*, expected an integer of 64 bits"),
    (kernels.linear_logprob, HEAD, {"backend": 3}, "backend is 3, expected None or a name"),
    (kernels.gae, GAE, {"backend": 3}, "backend is 3, expected None or a name"),
    (kernels.add_rms_norm, NORM, {"backend": []}, "backend is a list, expected None or a name"),
    (kernels.linear_preference_loss, PAIRS, {"loss": "ipo", "beta": 1e-45}, "beta is 1e-45, expected a number above 0"),
    (kernels.linear_logprob, HEAD, {"softcap": 1e-50}, "softcap is 1e-50"),
    (kernels.linear_kl, KL, {"backend": 3}, "backend is 3, expected None or a name"),
    (kernels.linear_logprob, HEAD, {"weight": W[:, :7]}, r"weight is \[16, 7\].*expected \[V, 8\]"),
    (
        kernels.linear_logprob,
        HEAD,
        {"weight": W.bfloat16()},
        r"weight is \[16, 8\] bfloat16.*float32 on cpu like hidden",
    ),
    (kernels.linear_logprob, HEAD, {"weight": W[:1]}, "V at least 2"),
    (kernels.linear_logprob, HEAD, {"weight": W.to("meta")}, "weight is .* on meta"),
    (kernels.linear_logprob, HEAD, {"targets": Y[:3]}, r"targets is \[3\] int64.*expected \[4\] int64"),
    (kernels.linear_logprob, HEAD, {"targets": Y.int()}, r"targets is \[4\] int32"),
    (kernels.linear_logprob, HEAD, {"targets": Y + 16}, r"targets\[0\] is 16, expected 0 to 15 or ignore_index=-100"),
    (kernels.linear_logprob, HEAD, {"targets": Y - 1}, r"targets\[0\] is -1"),
    (kernels.linear_logprob, HEAD, {"bias": W[0]}, r"bias is \[8\].*expected \[16\]"),
    (kernels.linear_logprob, HEAD, {"anchor": T[:2]}, r"anchor is \[2\].*expected \[4\]"),
    (kernels.linear_logprob, HEAD, {"temperature": 0.0}, "temperature is 0.0, expected a number above 0"),
    (kernels.linear_logprob, HEAD, {"temperature": T[:2]}, r"temperature is \[2\]"),
    (kernels.linear_logprob, HEAD, {"temperature": T}, "temperature is .*expected only finite numbers above 0"),
    (kernels.linear_logprob, HEAD, {"softcap": -1.0}, "softcap is -1.0"),
    (kernels.linear_logprob, HEAD, {"softcap": math.inf}, "softcap is inf, expected None or .* finite in fp32"),
    (kernels.linear_logprob, HEAD, {"softcap": 1e39}, r"softcap is 1e\+39, .* finite in fp32"),
    (kernels.linear_logprob, HEAD, {"temperature": math.inf}, "temperature is inf, .* finite in fp32"),
    (kernels.linear_logprob, HEAD, {"temperature": 1e-39}, "temperature is 1e-39, expected a number"),
    (kernels.linear_logprob, HEAD, {"hidden": H[:, :0], "weight": W[:, :0]}, r"hidden is \[4, 0\].*H at least 1"),
    (kernels.linear_logprob, HEAD, {"workspace_gib": 0}, "workspace_gib is 0"),
    (kernels.linear_logprob, HEAD, {"workspace_gib": math.inf}, "workspace_gib is inf"),
    (kernels.linear_logprob, HEAD, {"backend": "tpu"}, "backend='tpu' is not one of 'triton', 'cpu', 'reference'"),
    (
        kernels.linear_policy_loss,
        POLICY,
        {"loss": "ppo"},
        "loss is 'ppo', expected one of 'clip', 'reinforce', 'likelihood'",
    ),
    (
        kernels.linear_policy_loss,
        POLICY,
        {"kl_estimator": "k4"},
        "kl_estimator is 'k4', expected one of 'k1', 'k2', 'k3'",
    ),
    (kernels.linear_policy_loss, POLICY, {"ratio": "group"}, "ratio is 'group', expected one of 'token', 'sequence'"),
    (kernels.linear_policy_loss, POLICY, {"advantages": None}, "advantages is None"),
    (kernels.linear_policy_loss, POLICY, {"advantages": Y}, r"advantages is \[4\] int64.*floating"),
    (kernels.linear_policy_loss, POLICY, {"token_weights": T[:1]}, r"token_weights is \[1\]"),
    (kernels.linear_policy_loss, POLICY, {"kl_coef": 0.1}, "ref_logprobs is None.*kl_coef > 0"),
    (kernels.linear_policy_loss, POLICY, {"kl_coef": -0.1}, "kl_coef is -0.1"),
    (kernels.linear_policy_loss, POLICY, {"kl_coef": math.inf, "ref_logprobs": T}, "kl_coef is inf"),
    (kernels.linear_policy_loss, POLICY, {"entropy_coef": -math.inf}, "entropy_coef is -inf, expected a number"),
    (kernels.linear_policy_loss, POLICY, {"is_cap": 2.0}, "behaviour_logprobs is None.*is_cap"),
    (kernels.linear_policy_loss, POLICY, {"is_cap": 0.0, "behaviour_logprobs": T}, "is_cap is 0.0"),
    (
        kernels.linear_policy_loss,
        POLICY,
        {"is_cap": 2.0, "behaviour_logprobs": T, "loss": "likelihood"},
        "is_cap is 2.0",
    ),
    (kernels.linear_policy_loss, POLICY, {"ratio": "sequence"}, "cu_seqlens is None.*sequence"),
    (kernels.linear_policy_loss, POLICY, {"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is \[2\].*the 4 rows"),
    (kernels.linear_policy_loss, POLICY, {"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "rising"),
    (kernels.linear_policy_loss, POLICY, {"cu_seqlens": BOUNDS.float()}, "cu_seqlens is .* float32"),
    (kernels.linear_policy_loss, POLICY, {"dual_clip": 1.0}, "dual_clip is 1.0, expected None or a number above 1"),
    (kernels.linear_policy_loss, POLICY, {"dual_clip": 3.0, "loss": "reinforce"}, "dual_clip is 3.0.*loss=.clip"),
    (
        kernels.linear_preference_loss,
        PAIRS,
        {"loss": "dpo"},
        "loss is 'dpo', expected one of 'sigmoid', 'ipo', 'hinge'",
    ),
    (kernels.linear_preference_loss, PAIRS, {"beta": 0}, "beta is 0, expected a number above 0"),
    (kernels.linear_preference_loss, PAIRS, {"beta": math.inf}, "beta is inf, expected .* finite in fp32"),
    (kernels.linear_preference_loss, PAIRS, {"label_smoothing": 0.5}, "label_smoothing is 0.5, expected .*below 0.5"),
    (
        kernels.linear_preference_loss,
        PAIRS,
        {"loss": "ipo", "label_smoothing": 0.1},
        "label_smoothing is 0.1, expected 0 without loss=.sigmoid",
    ),
    (kernels.linear_preference_loss, PAIRS, {"cu_seqlens": BOUNDS[:2]}, r"cu_seqlens is \[2\].*2·pairs \+ 1"),
    (kernels.linear_preference_loss, PAIRS, {"cu_seqlens": BOUNDS + 1}, "cu_seqlens is .* from 0 to the 4 rows"),
    (kernels.linear_preference_loss, PAIRS, {"ref_logprobs": T[:3]}, r"ref_logprobs is \[3\].*expected \[4\]"),
    (kernels.linear_preference_loss, PAIRS, {"pair_weights": T[:2]}, r"pair_weights is \[2\].*expected \[1\]"),
    (kernels.linear_kl, KL, {"weight_q": W[:8]}, r"weight_q is \[8, 8\].*like weight_p"),
    (kernels.linear_kl, KL, {"hidden_q": H[:3]}, r"hidden_q is \[3, 8\].*expected \[4, H\]"),
    (kernels.linear_kl, KL, {"hidden_q": H.bfloat16()}, r"weight_q is .*bfloat16 on cpu like hidden_q"),
    (kernels.linear_kl, KL, {"bias_q": W[0]}, r"bias_q is \[8\].*expected \[16\]"),
    (kernels.linear_kl, KL, {"direction": "both"}, "direction is 'both', expected one of 'reverse', 'forward'"),
    (kernels.linear_kl, KL, {"temperature": -T}, "temperature is .*only finite numbers above 0"),
    (kernels.gae, GAE, {"rewards": T.double()}, "rewards is .* float64"),
    (kernels.gae, GAE, {"values": T[:3]}, r"values is \[3\].*expected \[4\]"),
    (kernels.gae, GAE, {"values": T.bfloat16()}, "values is .* bfloat16"),
    (kernels.gae, GAE, {"cu_seqlens": torch.tensor([1, 4])}, "from 0 to the 4 rows"),
    (kernels.gae, GAE, {"bootstrap": T}, r"bootstrap is \[4\].*expected \[2\]"),
    (kernels.gae, GAE, {"gamma": 1.5}, "gamma is 1.5"),
    (kernels.gae, GAE, {"lam": -0.5}, "lam is -0.5"),
]


@pytest.mark.parametrize(("function", "legal", "change", "message"), ILLEGAL)
def test_illegal_input(function, legal, change, message):
    function(**legal)
    with pytest.raises(
        (ValueError, TypeError), match=f"{function.__name__}: .*{message}|{function.__name__}: {message}"
    ):
        function(**(legal | change))


def test_vectors_of_any_stride(run):
    """Every argument that is a vector, as a column of a matrix, gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = 7, 40
    hidden, weight, other = (torch.randn(size, 9, generator=generator) for size in (rows, vocabulary, rows))
    columns = torch.randn(6, rows, generator=generator)
    vectors = {
        "targets": torch.randint(vocabulary, (rows,), generator=generator), "bounds": torch.tensor([0, 3, 7]),
        "advantages": columns[0], "token_weights": columns[1].abs(), "old": columns[2] - 4, "ref": columns[3] - 4,
        "behaviour": columns[4] - 4, "temperature": columns[5].abs() + 0.5, "pair_weights": torch.ones(1),
        "bootstrap": torch.ones(2), "bias": torch.randn(vocabulary, generator=generator),
    }  # fmt: skip

    def results(place) -> list[torch.Tensor]:
        v = {name: place(vector.to(run.device)) for name, vector in vectors.items()}
        leaves = [one.to(run.device).requires_grad_() for one in (hidden.clone(), weight.clone())]
        head = (*leaves, v["targets"])
        shape = {"bias": v["bias"].requires_grad_(), "temperature": v["temperature"], "backend": run.backend}
        weights = {"advantages": v["advantages"], "token_weights": v["token_weights"], "old_logprobs": v["old"]}
        all_of_it = {
            "ref_logprobs": v["ref"], "kl_coef": 0.1, "behaviour_logprobs": v["behaviour"], "is_cap": 2.0,
            "cu_seqlens": v["bounds"], "ratio": "sequence", "entropy_coef": 0.1,
        }  # fmt: skip
        pairs = {"cu_seqlens": v["bounds"], "ref_logprobs": v["ref"], "pair_weights": v["pair_weights"]}
        found = [
            kernels.linear_policy_loss(*head, **weights, **shape).loss,
            kernels.linear_policy_loss(*head, **weights, **all_of_it, **shape).loss,
            kernels.linear_preference_loss(*head, **pairs, **shape).loss,
            *kernels.linear_logprob(*head, anchor=v["old"], return_entropy=True, **shape),
        ]
        if run.has("linear_kl") and not run.interpreted:
            side = {"bias_p": shape.pop("bias"), "bias_q": v["bias"]}
            found.append(kernels.linear_kl(*leaves, other.to(run.device), leaves[1], **side, **shape))
        if run.has("gae"):
            steps = (v["advantages"], v["old"], v["bounds"], 0.9, 0.8)
            found += kernels.gae(*steps, bootstrap=v["bootstrap"], backend=run.backend)
        sum(one.sum() for one in found if one.requires_grad).backward()
        return [*found, leaves[0].grad, leaves[1].grad, v["bias"].grad]

    def column(vector):
        return torch.stack([torch.full_like(vector, 5), vector], 1)[:, 1].detach()

    for strided, plain in zip(results(column), results(torch.clone), strict=True):
        assert torch.equal(strided, plain)


def test_missing_build_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(dispatch, "is_built", lambda name: name == "reference")
    dispatch._warn_not_built.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"'cpu' is not built.*pip install") as caught:
        kernels.linear_logprob(H, W, Y)
        kernels.linear_logprob(H, W, Y)
    assert len([one for one in caught if one.category is RuntimeWarning]) == 1
    with pytest.raises(RuntimeError, match=r"backend='cpu' is not built.*pip install"):
        kernels.linear_logprob(H, W, Y, backend="cpu")


def test_forced_backends(monkeypatch):
    with pytest.raises(RuntimeError, match=r"backend='cuda' is not built: it is reserved for CUDA C\+\+ for Hopper"):
        kernels.linear_logprob(H, W, Y, backend="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend='triton' runs on cuda tensors, and on the CPU only with TRITON_INT"):
        kernels.linear_logprob(H, W, Y, backend="triton")


def test_a_backend_without_a_function_leaves_it_to_the_next(monkeypatch):
    monkeypatch.setattr(dispatch, "is_built", lambda name: name != "triton")
    monkeypatch.setattr(dispatch, "import_module", lambda name: SimpleNamespace(name=name, make_scanner=None))
    monkeypatch.setitem(dispatch.PARTS, "gae", "make_scanner")
    cpu = torch.device("cpu")
    assert dispatch.resolve("linear_logprob", cpu, None).name == "kernels.cpu"
    with pytest.raises(ValueError, match="backend='cpu' has no linear_kl"):
        dispatch.resolve("linear_kl", cpu, "cpu")
    whole = SimpleNamespace(name="kernels.eager", make_scanner=None, linear_kl=None)
    partial = SimpleNamespace(name="kernels.cpu", make_scanner=None)
    monkeypatch.setattr(dispatch, "import_module", {"kernels.cpu": partial, "kernels.eager": whole}.__getitem__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.resolve("linear_kl", cpu, None) is whole


def test_import_brings_in_nothing():
    code = "import kernels, sys; assert not {'torch', 'numpy', 'triton'} & set(sys.modules); kernels.nothing"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(dispatch.__file__).parents[1]
    )
    assert "AttributeError: module 'kernels' has no attribute 'nothing'" in result.stderr
    assert not hasattr(kernels, "__version__")


@pytest.mark.parametrize(
    ("function", "arguments"), [(kernels.linear_policy_loss, POLICY), (kernels.linear_preference_loss, PAIRS)]
)
def test_a_loss_has_no_second_derivative(function, arguments):
    """Rather than a gradient that leaves part of it out."""
    hidden = H.clone().requires_grad_()
    found = function(**arguments | {"hidden": hidden})
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found.loss, hidden, create_graph=True)


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.jacfwd])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (kernels.linear_logprob, HEAD, "hidden"), (kernels.linear_policy_loss, POLICY, "weight"),
        (kernels.linear_preference_loss, PAIRS, "hidden"), (kernels.linear_kl, KL, "weight_p"),
    ],
)  # fmt: skip
def test_there_is_no_forward_mode_derivative(function, arguments, name, transform):
    """Rather than a tangent of zeros."""

    def found(value):
        result = function(**arguments | {name: value})
        return result if isinstance(result, torch.Tensor) else result.loss

    with pytest.raises(RuntimeError, match=f"{function.__name__}: there is no forward-mode derivative"):
        if transform is torch.func.jvp:
            transform(found, (arguments[name],), (torch.ones_like(arguments[name]),))
        else:
            transform(found)(arguments[name])
