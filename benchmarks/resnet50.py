"""ResNet50 on made-up 3×224×224 images, as a workload: `benchmarks/resnet50.py:workload`."""

from __future__ import annotations

from torchvision.models import resnet50

from labhelpers.workloads import Workload, image_batches


def workload() -> Workload:
    """Return the job; it has no data, so every step trains on the same batch on the device."""
    return Workload(
        "resnet50", lambda: resnet50(num_classes=1000), image_batches((3, 224, 224), 1000)
    )
