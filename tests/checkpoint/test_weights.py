import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from syncline.checkpoint.huggingface import finish_folder, save_stage_weights
from syncline.checkpoint.weights import load_weights, local_folder
from syncline.errors import UserError
from syncline.modeling.load import build_meta_model
from syncline.modeling.materialise import materialise
from syncline.modeling.pipeline.split import cut, plan_split
from tests.modeling.families import FAMILIES, tiny_config, tiny_stages


def empty_stages(config, stages, dtype=torch.float32):
    meta = build_meta_model(config)
    plan = plan_split(meta, stages)
    parts = [cut(meta, plan, stage) for stage in range(stages)]
    for part in parts:
        materialise(part, dtype=dtype, device="cpu", seed=0, random_weights=False)
    return parts


def write_with_transformers(folder, config, **keywords):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, **keywords)
    return dict(model.named_parameters(remove_duplicate=False))


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_reads_what_it_owns(family, tied, tmp_path):
    config = tiny_config(family, tied=tied)
    expected = write_with_transformers(tmp_path, config, save_original_format=False)
    for stages in (1,) if family == "gpt2" else (1, 2):
        for stage in empty_stages(config, stages):
            load_weights(tmp_path, stage)
            for name, parameter in stage.parameters_by_name().items():
                assert torch.equal(parameter, expected[name]), name


def test_sharded_files_are_read_through_their_index(tmp_path):
    config = tiny_config("llama")
    expected = write_with_transformers(tmp_path, config, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = build_meta_model(config)
    materialise(model, dtype=torch.bfloat16, device="cpu", seed=0, random_weights=False)
    load_weights(tmp_path, model)
    assert all(torch.equal(parameter, expected[name].bfloat16()) for name, parameter in model.named_parameters())


def test_what_a_run_saves_another_split_loads(tmp_path):
    config = tiny_config("qwen3_moe", tied=True)
    saved = {}
    for stage in tiny_stages(config, 3, seed=4, dtype=torch.float32):
        save_stage_weights(tmp_path / "model", stage, 3)
        saved.update(stage.parameters_by_name())
    finish_folder(tmp_path / "model", config, None, 3)
    for stage in empty_stages(config, 2):
        load_weights(tmp_path / "model", stage)
        assert all(torch.equal(parameter, saved[name]) for name, parameter in stage.parameters_by_name().items())


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    config = tiny_config("llama")
    write_with_transformers(tmp_path, config)
    (stage,) = empty_stages(config, 1)
    edit(tmp_path, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    with pytest.raises(UserError, match=r"does not know model\.extra"):
        load_weights(tmp_path, stage)
    edit(tmp_path, lambda tensors: tensors.pop("model.extra"))
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(3,\) in the file and \(64,\) in the model"):
        load_weights(tmp_path, stage)
    edit(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        load_weights(tmp_path, stage)
    first, last = empty_stages(config, 2)
    load_weights(tmp_path, first)
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        load_weights(tmp_path, last)


def test_buffers_of_older_checkpoints_are_no_error(tmp_path):
    config = tiny_config("llama")
    write_with_transformers(tmp_path, config)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load_weights(tmp_path, empty_stages(config, 1)[0])


def test_names_without_the_base_prefix_are_understood(tmp_path):
    config = tiny_config("gpt2", tied=True)
    expected = write_with_transformers(tmp_path, config)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    edit(tmp_path, strip)
    (stage,) = empty_stages(config, 1)
    load_weights(tmp_path, stage)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in stage.parameters_by_name().items())


def test_weights_that_transformers_would_convert_are_refused(tmp_path):
    config = tiny_config("mixtral")
    write_with_transformers(tmp_path, config)
    assert any("experts.0" in name for name in load_file(tmp_path / "model.safetensors"))
    with pytest.raises(UserError, match=r"transformers converts .*experts"):
        load_weights(tmp_path, empty_stages(config, 1)[0])


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load_weights(tmp_path, empty_stages(tiny_config("llama"), 1)[0])
