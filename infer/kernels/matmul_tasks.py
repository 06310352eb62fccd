"""How matrix products are cut into tasks and items, and their start."""

from infer.kernels.compiled_matmul import MatmulJob, Task, multiply
from infer.kernels.ggml_activations import Activations
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.jobs import prepared_job
from infer.kernels.scratch import Scratch
from infer.kernels.thread_team import ThreadTeam
from shared.quants import TensorType, row_bytes

# Weights of an item. For few inputs memory is the bound, and it is read up to 1.5 times as fast in
# long stretches: as long as leaves each thread several. For many inputs a stretch that stays in the
# cache is used for all of them.
_FEW_INPUTS = 4
_ITEMS_A_THREAD = 16
_LEAST_ITEM_WEIGHTS = 16384
_MOST_ITEM_WEIGHTS = 262144
_MANY_INPUTS_ITEM_WEIGHTS = 65536


def item_rows(columns: int, inputs: int, weights: int, threads: int) -> int:
    """How many rows of a matrix make an item, when each is used for `inputs` inputs.

    weights: of all matrices that are multiplied in one go.
    """
    if inputs >= _FEW_INPUTS:
        return max(1, _MANY_INPUTS_ITEM_WEIGHTS // columns)
    share = weights // (_ITEMS_A_THREAD * threads)
    return max(1, min(max(share, _LEAST_ITEM_WEIGHTS), _MOST_ITEM_WEIGHTS) // columns)


def activation_type(library: GgmlLibrary, type_id: int, exact: bool) -> int:
    """The format in which weights of this type want their inputs."""
    return int(TensorType.F32) if exact else library.functions(type_id).vec_dot_type


def task_template(
    library: GgmlLibrary,
    activations: Activations,
    type_id: int,
    rows: int,
    columns: int,
    exact: bool,
) -> Task:
    """A task with all that follows from the weights' type and shape.

    Its inputs are the rows of `activations`; 0 where they are the floats themselves.
    UnsupportedModel where ggml cannot multiply by the type.
    """
    functions = library.functions(type_id)
    kind = activation_type(library, type_id, exact)
    return Task(
        rows=rows,
        columns=columns,
        weight_stride=row_bytes(type_id, columns),
        vec_dot=library.functions(TensorType.F32).vec_dot if exact else functions.vec_dot,
        to_float=functions.to_float if exact else 0,
        inputs=activations.address(kind),
        input_stride=activations.stride(kind, columns),
        output_stride=rows * 4,
    )


class Matmul:
    """Runs tasks; `columns` bounds their rows' width."""

    def __init__(self, team: ThreadTeam, scratch: Scratch, columns: int) -> None:
        self._team = team
        self.threads = team.threads
        self._job = prepared_job(MatmulJob, team.at)
        # The dequantised weights of one item
        self._job.tile_bytes = 4 * max(_MOST_ITEM_WEIGHTS, columns)
        self._job.tiles = scratch.reserve(team.threads * self._job.tile_bytes)

    def __call__(self, tasks: int, task_count: int, items: int) -> None:
        """Work off the items of the tasks at the address `tasks`."""
        job = self._job
        job.tasks, job.task_count, job.items = tasks, task_count, items
        self._team.run(job, multiply)
