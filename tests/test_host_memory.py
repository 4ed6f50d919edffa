"""The host's memory, and a container's limit where it is lower."""

import psutil
import pytest

from labhelpers.host_memory import host_free_bytes, host_total_bytes

MIB = 1024**2


@pytest.fixture
def cgroup(tmp_path):
    (tmp_path / "memory.max").write_text(f"{512 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 * MIB}\nfile 7\n")
    return tmp_path


def test_without_a_container_it_is_what_the_system_says(tmp_path):
    assert host_total_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < host_free_bytes(tmp_path) <= host_total_bytes(tmp_path)


def test_a_containers_limit_counts_and_its_file_cache_is_free(cgroup):
    assert host_total_bytes(cgroup) == 512 * MIB
    assert host_free_bytes(cgroup) == 312 * MIB


def test_a_container_without_a_limit_is_the_host(cgroup):
    (cgroup / "memory.max").write_text("max\n")
    assert host_total_bytes(cgroup) == psutil.virtual_memory().total
    assert host_free_bytes(cgroup) > 312 * MIB


def test_missing_statistics_count_as_no_cache(cgroup):
    (cgroup / "memory.stat").unlink()
    assert host_free_bytes(cgroup) == 212 * MIB


def test_a_container_over_its_limit_has_nothing_left(cgroup):
    (cgroup / "memory.current").write_text(f"{900 * MIB}\n")
    assert host_free_bytes(cgroup) == 0
