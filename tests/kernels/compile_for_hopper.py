"""Run the Triton backend's host code on the CPU with every launch turned into a compilation for compute capability 9.0.

No GPU is needed, and nothing is computed: what is seen is whether each kernel compiles with the arguments it is really
given, and whether it spills registers. The argument names a part: hopper, portable or rows. Prints a line a kernel:
name, bytes of stack, variant. Every call is then made with other numbers of rows; "again" and a name is printed for
each kernel that these compile anew.
"""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_launcher
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def stack_bytes(cubin: bytes) -> int:
    """Local memory of a kernel, which is where registers spill to."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


launch, seen, other_rows = JITFunction.run, set(), False


def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    if kernel.hash not in seen:
        seen.add(kernel.hash)
        if other_rows:
            print("again", self.__name__, flush=True)
            return kernel
        # What a GPU's driver would build to pass the arguments.
        make_launcher(kernel.src.constants, kernel.src.signature, kernel.metadata.tensordesc_meta)
        flags = " ".join(f"{key}={value}" for key, value in kwargs.items() if key.isupper())
        print(self.__name__, stack_bytes(kernel.asm["cubin"]), flags, flush=True)
    return kernel


def compile_all(self, *args, **kwargs):
    """Every configuration that would be timed."""
    arguments = dict(zip(self.arg_names, args, strict=False))
    for config in self.early_config_prune(self.configs, arguments, **kwargs):
        self.fn.run(*args, **kwargs, **config.all_kwargs())


def problems(dtype: torch.dtype, hopper: bool):
    """Inputs that lead to each variant: plain, with a bias, capped, with an entropy bonus, in many chunks."""
    for width in (64, 576, 2048) if hopper else (576,):
        hidden = torch.randn(320, width, dtype=dtype, requires_grad=True)
        weight = torch.randn(1008, width, dtype=dtype, requires_grad=True)
        targets = torch.randint(1008, (320,))
        yield hidden, weight, targets, {}
    yield hidden, weight, targets, {"bias": torch.zeros(1008, requires_grad=True), "softcap": 30.0, "entropy_coef": 0.1}
    if hopper:  # dW over two chunks and over more
        yield hidden, weight, targets, {"workspace_gib": 1.7e-3}
        yield hidden, weight, targets, {"workspace_gib": 3e-4}


def call_all(kernels, hidden, weight, targets, ratio, settings) -> None:
    """Every function whose launches depend on a problem."""
    hidden, count = hidden.requires_grad_(), len(hidden)
    names = ("token_weights", "advantages", "old_logprobs", "ref_logprobs")
    rows = {name: torch.rand(count) for name in names}
    bounds = torch.tensor([0, count // 3, count]) if ratio == "sequence" else None
    found = kernels.linear_policy_loss(
        hidden, weight, targets, **rows, kl_coef=0.1, ratio=ratio, cu_seqlens=bounds, backend="triton", **settings
    )
    found.loss.backward()
    options = {key: value for key, value in settings.items() if key != "entropy_coef"}
    kernels.linear_logprob(hidden.detach(), weight.detach(), targets, backend="triton", **options)
    bias = options.pop("bias", None)
    for direction in ("reverse", "forward"):
        kernels.linear_kl(
            hidden, weight, hidden[:, :48].detach(), weight[:, :48].detach(), bias_p=bias,
            direction=direction, backend="triton", **options,
        ).sum().backward()  # fmt: skip


def call_formulas() -> None:
    """The kernel of the rows' coefficients for every token loss and KL estimator."""
    from kernels.coefficients import PolicySpec, Rows
    from kernels.token_losses import KL_ESTIMATORS, LOSSES
    from kernels.triton.policy import row_coefficients

    ones = torch.ones(320)
    formulas = [(loss, "k3") for loss in LOSSES] + [("reinforce", estimator) for estimator in KL_ESTIMATORS]
    for loss, estimator in formulas:
        for bound in (None, 2.0):
            dual_clip = bound if LOSSES[loss].dual_clip else None
            spec = PolicySpec(loss, 0.2, 0.2, 0.1, estimator, 0.1, bound, "token", dual_clip)
            row_coefficients(spec, ones, ones, Rows(ones.bool(), ones, ones, ones, ones, ones, None))


def call_norms(kernels, width: int, rows: int) -> None:
    """Both kernels with and without a branch, a gradient of the sum and one of the weight."""
    residual, branch = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bfloat16)
    for weight in (torch.zeros(width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16).requires_grad_()):
        for other in (None, branch):
            for used in (1, 2):
                outputs = kernels.add_rms_norm(residual.requires_grad_(), other, weight, 1e-6, backend="triton")
                torch.autograd.backward(outputs[-used:], [torch.zeros_like(one) for one in outputs[-used:]])


def compile_heads(kernels, hopper: bool) -> None:
    """Everything that reads a head, with Hopper's kernels or the portable ones."""
    global other_rows
    from kernels.triton.hopper import kl as hopper_kl
    from kernels.triton.hopper import products

    products.is_hopper = hopper_kl.is_hopper = lambda device: hopper
    for hidden, weight, targets, settings in problems(torch.bfloat16 if hopper else torch.float32, hopper):
        for ratio in ("token", "sequence"):
            for rows in (320, 319, 318, 37):
                other_rows = rows < 320
                call_all(kernels, hidden.detach()[:rows], weight, targets[:rows].clone(), ratio, settings)


def compile_rows(kernels) -> None:
    """The kernels that read rows of numbers."""
    global other_rows
    for width in (576, 1536, 8192):
        for rows in (320, 319, 37, 1):
            other_rows = rows < 320
            call_norms(kernels, width, rows)
    other_rows = False
    ones, bounds = torch.ones(320), torch.tensor([0, 100, 320])
    kernels.gae(ones, ones, bounds, 0.9, 0.9, backend="triton")
    call_formulas()


def main(part: str) -> None:
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    Autotuner.run = compile_all
    # vLLM installs such a hook. Triton then writes a kernel's constant arguments as JSON.
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: None
    import kernels
    import kernels.triton.kl as kl
    import kernels.triton.norm as norm
    import kernels.triton.scanner as scanner
    from kernels import dispatch

    scanner.processors = kl.processors = norm.processors = lambda device: 132
    dispatch.runs_on = lambda name, device: True
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # the host reads a row count
    torch.cuda.device = torch.cuda.stream = lambda where: nullcontext()
    torch.cuda.current_stream = torch.cuda.Stream = lambda device: SimpleNamespace(wait_stream=lambda other: None)
    if part == "rows":
        compile_rows(kernels)
    else:
        compile_heads(kernels, hopper=part == "hopper")


if __name__ == "__main__":
    main(sys.argv[1])
