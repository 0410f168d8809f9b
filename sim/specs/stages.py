"""`partitioned`: how many of a model's layers lie on each stage of a pipeline."""

from sim.errors import UserError


def partitioned(num_layers: int, stages: int, asked: str | None = None) -> tuple[int, ...]:
    """Layers of each stage, as `asked` (`VLLM_PP_LAYER_PARTITION`), else as vLLM has them (`get_pp_indices`).

    Those that are left over go one each to the stages from the last but one to the front, the first comes last.

    Raises:
        UserError: `asked` does not say a number of layers for each stage, or these are not the model's.
    """
    if asked is None:
        each, left = divmod(num_layers, stages)
        if not each:
            raise UserError(f"--pipeline-parallel-size {stages}: the model has {num_layers} layers; give fewer stages")
        return tuple(each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages))
    words = asked.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise UserError(f"--pp-layer-partition {asked}: is not layers of each stage; give numbers, as 20,21,21")
    found = tuple(map(int, words))
    if len(found) != stages or sum(found) != num_layers:
        raise UserError(
            f"--pp-layer-partition {asked}: {len(found)} stages of {sum(found)} layers in all; the model has "
            f"{num_layers} on {stages}; give as many"
        )
    return found
