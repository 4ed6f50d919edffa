"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import torch
from torch import nn

from labhelpers.store import open_run

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def block(text: str) -> str:
    (found,) = [each for each in BLOCKS if text in each]
    return found


def test_the_workload_of_ones_own_is_swept(call, tmp_path):
    (tmp_path / "mymodel.py").write_text(block("def make_workload"), encoding="utf-8")
    code, output, errors = call(
        "sweep", "--workload", "mymodel.py:make_workload", "--batch-sizes", "64,128",
        "--repeats", "1", "--device", "cpu", "--output", "run",
    )  # fmt: skip
    assert code == 0, errors
    assert "of the best speed measured" in output
    assert [t.images for t in open_run(tmp_path / "run").trials("sweep")] == [512, 512]


def test_the_functions_are_called_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1000))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    images, labels = torch.rand(2, 3, 224, 224), torch.tensor([1, 2])
    before = [parameter.clone() for parameter in model.parameters()]

    def train_step(images, labels):
        torch.empty(2**50, dtype=torch.uint8)

    names = {
        "nn": nn, "model": model, "optimizer": optimizer, "train_step": train_step,
        "images": images, "labels": labels, "loader": [(images, labels)] * 5,
    }  # fmt: skip
    found = block("size = find_batch_size").replace("50_000", "4")
    exec(found, names)
    assert names["size"] == 4
    assert all(map(torch.equal, before, model.parameters()))
    exec(block("attempt(train_step"), names)
    assert not names["tried"].ok
    assert not all(map(torch.equal, before, model.parameters()))
