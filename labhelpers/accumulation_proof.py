"""Hold accumulated gradients to those of the whole batch, layer kind by layer kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labhelpers.accumulation import accumulate, micro_batches
from labhelpers.gradients import catch_gradients, relative_change
from labhelpers.workloads import Batch, fashion_cnn, image_batches

EQUAL = 1e-10
"""Gradients in float64 that differ by less than this share of their length are equal."""

_CHANNELS, _SIDE, _SEED = 16, 28, 42


@dataclass(frozen=True)
class Comparison:
    """How far a gradient over micro-batches is from that of the whole batch, relative norms."""

    what: str
    recipe: str
    micro_sizes: tuple[int, ...]
    gradient_change: float | None
    loss_change: float | None

    @property
    def equal(self) -> bool:
        """Whether both gradients agree to rounding."""
        return self.gradient_change is not None and self.gradient_change < EQUAL


def compare_with_whole_batch(
    make_model: Callable[[], nn.Module], batch: Batch, micro_size: int, what: str,
    *, usual_recipe: bool = False,
) -> Comparison:  # fmt: skip
    """Compare the gradient accumulated over micro-batches with the whole batch's, in float64.

    Both begin with the same weights; random numbers, such as dropout masks, are drawn anew.

    Args:
        make_model: returns a model whose weights depend on torch's seed alone.
        batch: inputs and targets on the CPU.
        usual_recipe: divide each micro-batch's mean loss by their number, as loops commonly
            do, instead of weighting it by its samples.
    """
    loss = nn.functional.cross_entropy
    whole, whole_loss = _gradients(make_model, [batch], loss, draw=1)
    parts = micro_batches(*batch, micro_size)

    def mean_of_means(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets) / len(parts)

    function = mean_of_means if usual_recipe else loss
    mean_loss = not usual_recipe
    found, found_loss = _gradients(make_model, parts, function, draw=2, mean_loss=mean_loss)
    return Comparison(
        what,
        "divide by their number" if usual_recipe else "weight by samples",
        tuple(len(targets) for _, targets in parts),
        relative_change(found, whole),
        abs(found_loss - whole_loss) / abs(whole_loss),
    )


def compare_layers(samples: int = 40, micro_size: int = 16) -> list[Comparison]:
    """Compare for FashionCNN as it is, and with one layer more of each kind that may matter.

    40 samples in micro-batches of 16 leave a shorter last one of 8.
    """
    torch.manual_seed(_SEED)
    images, labels = image_batches((1, _SIDE, _SIDE), 10)(samples, torch.device("cpu"))
    batch = images.double(), labels
    layers: dict[str, Callable[[], nn.Module]] = {
        "no such layer (FashionCNN)": nn.Identity,
        "LayerNorm": lambda: nn.LayerNorm((_CHANNELS, _SIDE, _SIDE)),
        "BatchNorm": lambda: nn.BatchNorm2d(_CHANNELS),
        "dropout": lambda: nn.Dropout(0.5),
    }
    found = [
        compare_with_whole_batch(lambda make=make: _with_layer(make()), batch, micro_size, what)  # type: ignore[misc]
        for what, make in layers.items()
    ]
    plain = "no such layer (FashionCNN)"
    usual = compare_with_whole_batch(
        lambda: _with_layer(nn.Identity()), batch, micro_size, plain, usual_recipe=True
    )
    return [*found, usual]


def _with_layer(layer: nn.Module) -> nn.Module:
    """Return FashionCNN with one layer more behind the first convolution."""
    first, *rest = fashion_cnn()
    return nn.Sequential(first, layer, *rest)


def _gradients(
    make_model: Callable[[], nn.Module], batches: list[Batch],
    loss: Callable[[Tensor, Tensor], Tensor], *, draw: int, mean_loss: bool = True,
) -> tuple[list[Tensor], float]:  # fmt: skip
    """Return the gradient of the one update that the batches make together, and the loss."""
    torch.manual_seed(_SEED)
    model = make_model().double().train()
    torch.manual_seed(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with catch_gradients(optimizer) as caught:
        done = accumulate(model, batches, loss, optimizer, window=len(batches), mean_loss=mean_loss)
    assert caught.gradients is not None
    return caught.gradients, done.loss
