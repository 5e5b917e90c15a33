"""Trainers of transformers and Lightning in a job: where one that was started again begins."""

import json
import pathlib

import pytest

from conftest import DEADLINE, Jobs, succeed

SGD = {"type": "SGD", "learningRate": 0.01, "momentum": 0.0}

# 10 batches in an epoch; of three that make a step the last is left over.
EXAMPLES = """
import json
read, steps, accumulate = [], int(os.environ["STEPS"]), int(os.environ["ACCUMULATE"])
examples = [{"x": torch.tensor([float(i)]) / 40, "labels": torch.tensor(float(i))} for i in range(40)]
def die(step):
    if step == int(os.environ.get("DIES", -1)):
        os._exit(9)
def end(job, global_step):
    print("RESULT", json.dumps({"step": job.step, "global_step": global_step, "read": read}))
"""
TRANSFORMERS = """
import transformers
from psjobs.huggingface import Trainer

class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        die(state.global_step)

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
    def forward(self, x, labels):
        read.extend(labels.tolist())
        return {"loss": (self.line(x).squeeze(-1) - labels).pow(2).mean()}

arguments = transformers.TrainingArguments(
    output_dir=os.environ["OUTPUT"], num_train_epochs=3, max_steps=steps, per_device_train_batch_size=4,
    gradient_accumulation_steps=accumulate, report_to=[], save_strategy="no", logging_steps=1,
    disable_tqdm=True, use_cpu=True,
)
trainer = Trainer(model=Line(), args=arguments, train_dataset=examples, callbacks=[Dies()])
result = trainer.train()
end(trainer.job, result.global_step)
"""
LIGHTNING = """
import lightning.pytorch as lightning
from psjobs.lightning import Strategy

class Dies(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        die(trainer.global_step)

class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
    def training_step(self, batch):
        read.extend(batch["labels"].tolist())
        return (self.line(batch["x"]).squeeze(-1) - batch["labels"]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

strategy = Strategy()
trainer = lightning.Trainer(
    accelerator="cpu", strategy=strategy, max_epochs=3 if steps < 0 else None, max_steps=steps, accumulate_grad_batches=accumulate,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Dies()],
    default_root_dir=os.environ["OUTPUT"],
)
trainer.fit(Line(), torch.utils.data.DataLoader(examples, 4, shuffle=True))
end(strategy.job, trainer.global_step)
"""


FLAGS = ("--consistency", "sync", "--optimizer", "sgd", "--learning-rate", "0.01", "--momentum", "0")
TRAINING = {"consistency": {"mode": "Sync"}, "optimizer": SGD, "batch": {"base": 4}}


def result(said: str) -> dict[str, object]:
    (line,) = (line for line in said.splitlines() if line.startswith("RESULT "))
    found: dict[str, object] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("script", [TRANSFORMERS, LIGHTNING], ids=["transformers", "lightning"])
@pytest.mark.parametrize(
    ("accumulate", "limit", "steps", "dies"),
    [(1, -1, 30, (10, 14)), (3, -1, 9, (3, 7)), (1, 15, 15, (15,))],
    ids=["epochs", "accumulated", "max-steps"],
)
def test_a_trainer_that_is_started_again_makes_the_steps_that_are_left(
    jobs: Jobs, tmp_path: pathlib.Path, script: str, accumulate: int, limit: int, steps: int, dies: tuple[int, ...]
) -> None:
    more = {"OUTPUT": str(tmp_path / "output"), "ACCUMULATE": str(accumulate), "STEPS": str(limit)}
    (whole,) = succeed(jobs.start(*FLAGS, **TRAINING).trainer(0, EXAMPLES + script, **more))
    whole_result = result(whole)
    assert (whole_result["step"], whole_result["global_step"]) == (steps, steps)
    read = whole_result["read"]
    assert isinstance(read, list) and len(read) == steps * accumulate * 4

    job = jobs.start(*FLAGS, **TRAINING)
    for incarnation, step in enumerate(dies):
        killed = job.trainer(0, EXAMPLES + script, DIES=str(step), PSJOB_INCARNATION=str(incarnation), **more)
        assert killed.wait(DEADLINE) == 9
    (rest,) = succeed(job.trainer(0, EXAMPLES + script, PSJOB_INCARNATION=str(len(dies)), **more))
    assert result(rest) == {"step": steps, "global_step": steps, "read": read[dies[-1] * accumulate * 4 :]}
    assert job.server.wait(DEADLINE) == 0 and f"done steps={steps}" in job.log.read_text()


def test_lightning_shares_out_training_data_that_is_not_shuffled_and_validates_on_all(
    jobs: Jobs, tmp_path: pathlib.Path
) -> None:
    script = LIGHTNING.replace("DataLoader(examples, 4, shuffle=True)", "DataLoader(examples, 4), LOADER")
    script = script.replace("LOADER", "torch.utils.data.DataLoader(examples, 4)")
    validate = """    def validation_step(self, batch):
        validated.extend(batch["labels"].tolist())
    def configure_optimizers"""
    script = script.replace("    def configure_optimizers", validate)
    script = "validated = []\n" + script + "assert sorted(set(validated)) == [float(i) for i in range(40)], validated\n"
    job = jobs.start(*FLAGS, trainers=2, **TRAINING)
    more = {"OUTPUT": str(tmp_path), "ACCUMULATE": "1", "STEPS": "-1"}
    said = [result(text) for text in succeed(*(job.trainer(index, EXAMPLES + script, **more) for index in range(2)))]
    assert [(one["step"], one["global_step"]) for one in said] == [(15, 15)] * 2
    read = [example for one in said for example in one["read"]]  # type: ignore[attr-defined]
    assert sorted(read) == sorted([float(i) for i in range(40)] * 3)
