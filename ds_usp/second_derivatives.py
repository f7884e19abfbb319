"""Gradients that are asked to be differentiable themselves (``create_graph=True``)."""

from __future__ import annotations

import torch

from ds_usp.errors import ConfigError, USPError


def refuse_second_derivative(what: str, error: type[USPError] = ConfigError) -> None:
    """Call it in the backward pass of an ``autograd.Function`` whose operations autograd cannot
    follow: collectives, kernels, gradients that the forward pass has computed. Their derivatives
    would be missing from the result without an error.

    Args:
        what: has the gradient; for the message.

    Raises:
        USPError: of the class ``error``, where autograd records this backward pass.
    """
    if torch.is_grad_enabled():
        raise error(
            f"the gradient of {what} was asked to be differentiable itself (create_graph=True, or "
            "torch.func of a gradient), which is not computed here: leave create_graph out, or "
            f"compute this part of the loss without {what}"
        )
