import pytest

from syncline.distributed.rank import RankEnvironment, rank_environment
from syncline.errors import UserError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "node[07-09,12],login1",
    "SLURM_JOB_ID": "100234",
}


def test_an_ordinary_process_is_no_rank():
    assert rank_environment({}) is None
    assert rank_environment({"MASTER_ADDR": "somewhere"}) is None
    assert rank_environment({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert rank_environment({"SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1"}) is None


def test_torchrun():
    assert rank_environment(TORCHRUN) == RankEnvironment(3, 4, 1, 1, "10.0.0.7", 29500)


def test_torchrun_inside_slurm_is_torchrun():
    assert rank_environment({**SLURM, **TORCHRUN}) == RankEnvironment(3, 4, 1, 1, "10.0.0.7", 29500)


def test_slurm():
    assert rank_environment(SLURM) == RankEnvironment(5, 8, 1, 1, "node07", 15_000 + 100_234 % 15_000)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a1,a2", "a1"),
        ("gpu[3]", "gpu3"),
        ("gpu-[001-128]", "gpu-001"),
        ("rack[1-2]node[10,12]", "rack1node10"),
    ],
)
def test_first_slurm_host(nodes, first):
    environment = rank_environment({**SLURM, "SLURM_NODELIST": nodes})
    assert environment is not None
    assert environment.address == first


def test_the_nodes_of_the_step_count_where_it_has_fewer_than_the_job():
    environment = rank_environment({**SLURM, "SLURM_STEP_NODELIST": "node[12]"})
    assert environment is not None
    assert environment.address == "node12"


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_incomplete_torchrun_variables_are_refused(missing):
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UserError, match=f"{missing} is missing.*torchrun"):
        rank_environment(variables)


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_NODELIST", "SLURM_JOB_ID"])
def test_incomplete_slurm_variables_are_refused(missing):
    variables = {name: value for name, value in SLURM.items() if name != missing}
    with pytest.raises(UserError, match=f"{missing} is missing.*srun"):
        rank_environment(variables)


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "-1"}, {"MASTER_PORT": "http"}])
def test_contradictions_are_refused(wrong):
    with pytest.raises(UserError):
        rank_environment({**TORCHRUN, **wrong})


def test_a_port_that_is_none_is_refused_at_once():
    with pytest.raises(UserError, match="MASTER_PORT=0"):
        rank_environment({**TORCHRUN, "MASTER_PORT": "0"})
