"""Four feeds: the same images, bit by bit, in the same order."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from labhelpers.feeds import epoch_order, make_feed, pixel_table
from labhelpers.inputs import InputError

CPU = torch.device("cpu")
FEEDS = ("article", "workers", "host", "resident")


@pytest.mark.parametrize("images", [1, 2, 7, 100, 60_000])
@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
def test_our_order_is_that_of_a_shuffling_loader(images, seed):
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(range(images), batch_size=4096, shuffle=True, generator=generator)
    assert torch.equal(torch.cat(list(loader)), epoch_order(images, seed))


def test_a_pixel_is_what_totensor_makes_of_it():
    from torchvision.transforms import ToTensor

    pixels = torch.arange(256, dtype=torch.uint8).reshape(16, 16).numpy()
    assert torch.equal(ToTensor()(pixels).reshape(-1), pixel_table(CPU))


def batches_of(name: str, data_report, **given: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    options = {"batch_size": 64, "seed": 42, "device": CPU, "images": 200, "workers": 2} | given
    return list(
        make_feed(name, str(data_report.data_dir), synthetic=data_report.synthetic, **options)
    )


def test_four_feeds_give_bit_equal_images_in_the_same_order(data_report):
    first, *others = [batches_of(name, data_report) for name in FEEDS]
    assert [len(labels) for _, labels in first] == [64, 64, 64, 8]
    assert {images.shape[1:] for images, _ in first} == {(1, 28, 28)}
    for other in others:
        for (images, labels), (same_images, same_labels) in zip(first, other, strict=True):
            assert images.dtype == same_images.dtype == torch.float32
            assert labels.dtype == same_labels.dtype == torch.int64
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)


def test_an_epoch_holds_each_image_once(data_report):
    images = torch.cat([images for images, _ in batches_of("host", data_report)])
    ordered = torch.cat(
        [images for images, _ in batches_of("article", data_report, batch_size=7, seed=1)]
    )
    assert sorted(images.sum((1, 2, 3)).tolist()) == sorted(ordered.sum((1, 2, 3)).tolist())
    assert not torch.equal(images, ordered)


@pytest.mark.parametrize("name", ["host", "resident"])
def test_each_epoch_begins_anew_and_knows_its_length(data_report, name):
    feed = make_feed(
        name, str(data_report.data_dir), batch_size=64, seed=42, device=CPU, images=200,
        synthetic=data_report.synthetic,
    )  # fmt: skip
    assert len(feed) == 4
    first, second = list(feed), list(feed)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))


@pytest.mark.parametrize("name", FEEDS)
def test_more_images_than_there_are_is_bad_input(data_report, name):
    with pytest.raises(InputError) as caught:
        batches_of(name, data_report, images=60_001)
    assert str(caught.value) == "images: got 60,001; the data set has 60,000"


def test_an_unknown_feed_is_bad_input(data_report):
    with pytest.raises(InputError) as caught:
        batches_of("tape", data_report)
    assert str(caught.value) == (
        "feed: got 'tape'; must be 'article', 'workers', 'host' or 'resident'"
    )


PRECISION = """
import torch
from labhelpers.training import read_precision, set_precision
for asked in ("fp32", "tf32", "bf16", "fp16", "fp32"):
    print(asked, *set_precision(asked).values())
torch.backends.cuda.matmul.allow_tf32 = True  # what somebody's old code does
print("legacy", *read_precision().values())
print("again", *set_precision("fp32").values())
try:
    set_precision("fp8")
except ValueError as error:
    print(error)
"""


def test_precision_is_read_back_and_a_legacy_switch_shows_as_mixed():
    # In a process of its own: the settings are global, and mixing styles cannot be undone.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRECISION], capture_output=True, text=True,
        check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "fp32 ieee ieee ieee", "tf32 tf32 tf32 tf32", "bf16 ieee ieee ieee",
        "fp16 ieee ieee ieee", "fp32 ieee ieee ieee", "legacy tf32 ieee mixed",
        "again ieee ieee ieee", "precision: got 'fp8'; must be fp32, tf32, bf16 or fp16",
    ]  # fmt: skip
