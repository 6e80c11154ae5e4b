"""A small run of every kernel, for compute-sanitizer: ragged sizes, an ignored row, dead rows, an anchor far off."""

import torch

import kernels


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, vocabulary, width = 333, 1237, 192
    for dtype in (torch.bfloat16, torch.float32):
        hidden = torch.randn(rows, width, device="cuda", generator=generator).to(dtype).requires_grad_()
        weight = (torch.randn(vocabulary, width, device="cuda", generator=generator) / width**0.5).to(dtype)
        weight.requires_grad_()
        targets = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
        targets[5] = -100
        old = kernels.linear_logprob(hidden.detach(), weight.detach(), targets)
        old += 0.3 * torch.randn(rows, device="cuda", generator=generator)
        old[7] += 90
        advantages = torch.randn(rows, device="cuda", generator=generator)
        advantages[::3] = 0
        weights = torch.full((rows,), 1 / rows, device="cuda")
        for settings in ({}, {"entropy_coef": 0.1}, {"workspace_gib": 1.5e-3}):
            kernels.linear_policy_loss(
                hidden, weight, targets, advantages=advantages, token_weights=weights, old_logprobs=old, **settings
            ).loss.backward()
        kernels.linear_preference_loss(
            hidden, weight, targets, cu_seqlens=torch.tensor([0, 100, rows]), ref_logprobs=old,
            pair_weights=torch.ones(1, device="cuda"), loss="sigmoid", beta=0.1, label_smoothing=0.0,
        ).loss.backward()  # fmt: skip
        kernels.linear_kl(hidden, weight, hidden.detach() * 0.9, weight.detach()).sum().backward()
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
        stream = hidden.detach().float().requires_grad_()
        for branch in (None, hidden):
            total, normed = kernels.add_rms_norm(stream, branch, weight[0], 1e-6)
            (total.sum() + normed.float().square().sum()).backward()
        assert stream.grad.isfinite().all()
        kernels.gae(advantages, old, torch.tensor([0, 100, rows], device="cuda"), 0.99, 0.95)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
