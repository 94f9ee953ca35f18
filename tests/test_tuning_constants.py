"""Constants of the cost model: a file a GPU, and what stands in for one."""

import dataclasses
import json

import pytest

from pallas_gemm import hardware, report
from pallas_gemm.tuning import constants

H200 = hardware.lookup("H200")
PATH = constants.path_of("NVIDIA H200")


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of constants of its own, that is empty; nothing was said yet."""
  monkeypatch.setattr(constants, "FOLDER", tmp_path)
  constants.of.cache_clear()
  report.reset()
  yield tmp_path
  constants.of.cache_clear()
  report.reset()


def write(folder, device, clock):
  found = constants.read(PATH) | {"device": device}
  found[constants.WIDTH]["model"]["clock"] = clock
  text = json.dumps(found)
  path = folder / constants.path_of(device).name
  path.write_text(text)
  return path


def test_a_file_is_read_once_and_has_every_field():
  found = constants.of(H200)
  assert constants.of(H200) is found
  for part in dataclasses.fields(found):
    values = dataclasses.asdict(getattr(found, part.name))
    assert values == constants.read(PATH)[constants.WIDTH][part.name]


def test_groups_of_rows_have_an_l2_of_their_own():
  found = constants.of(H200)
  of_rows = found.of_groups_of_rows
  assert of_rows.model.l2 == found.grouped.l2 != found.model.l2
  assert of_rows is found.of_groups_of_rows


@pytest.mark.parametrize(
  ("name", "clock"),
  (
    ("NVIDIA H100 80GB HBM3", 1.0),  # as many SMs
    ("NVIDIA H100 NVL", 1.0),
    ("NVIDIA GH200 480GB", 1.0),
    ("NVIDIA B200", 1.0),
    ("NVIDIA A100 80GB PCIe", 3.0),
    ("NVIDIA L4", 3.0),
  ),
)
def test_the_nearest_stands_in_and_that_is_said_once(
  folder, caplog, name, clock
):
  write(folder, "NVIDIA H200", 1.0)
  write(folder, "NVIDIA H100 PCIe", 2.0)
  write(folder, "NVIDIA A100-SXM4-40GB", 3.0)
  gpu = hardware.lookup(name)
  partition = dataclasses.replace(gpu, sm_count=gpu.sm_count - 1)
  for some in (gpu, gpu, partition):
    assert constants.of(some).model.clock == clock
  [said] = [x for x in caplog.messages if "no constants" in x]
  assert name in said


@pytest.mark.parametrize(
  ("text", "told"),
  (
    ("", "broken"),
    ("[]", "broken"),
    ('{"device": "NVIDIA H200"}', "16 bits"),
    ('{"device": "NVIDIA H200", "16 bits": {"model": {}}}', "clock"),
  ),
)
def test_a_broken_file_is_named(folder, text, told):
  path = folder / PATH.name
  path.write_text(text)
  with pytest.raises(RuntimeError, match=told) as error:
    constants.of(H200)
  assert str(path) in str(error.value)


def test_a_constant_that_is_no_number_is_named(folder):
  path = write(folder, "NVIDIA H200", "fast")
  with pytest.raises(RuntimeError, match="clock") as error:
    constants.of(H200)
  assert str(path) in str(error.value)


def test_that_there_are_no_constants_at_all_is_an_error(folder):
  with pytest.raises(RuntimeError, match=r"json"):
    constants.of(H200)
