"""transformers' Trainer in a job: where one that was started again begins."""

import json
import pathlib

import pytest

from conftest import DEADLINE, Jobs, succeed

SGD = {"type": "SGD", "learningRate": 0.01, "momentum": 0.0}

# 10 batches in an epoch; of three that make a step the last is left over.
SCRIPT = """
import json
import transformers
from psjobs.huggingface import Trainer

class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == int(os.environ.get("DIES", 0)):
            os._exit(9)

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
    def forward(self, x, labels):
        read.extend(labels.tolist())
        return {"loss": (self.line(x).squeeze(-1) - labels).pow(2).mean()}

read = []
examples = [{"x": torch.tensor([float(i)]) / 40, "labels": torch.tensor(float(i))} for i in range(40)]
arguments = transformers.TrainingArguments(
    output_dir=os.environ["OUTPUT"], num_train_epochs=3, max_steps=int(os.environ["STEPS"]), per_device_train_batch_size=4,
    gradient_accumulation_steps=int(os.environ["ACCUMULATE"]), report_to=[], save_strategy="no", logging_steps=1,
    disable_tqdm=True, use_cpu=True,
)
trainer = Trainer(model=Line(), args=arguments, train_dataset=examples, callbacks=[Dies()])
result = trainer.train()
print("RESULT", json.dumps({"step": trainer.job.step, "global_step": result.global_step, "read": read}))
"""


def result(said: str) -> dict[str, object]:
    (line,) = (line for line in said.splitlines() if line.startswith("RESULT "))
    found: dict[str, object] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize(
    ("accumulate", "limit", "steps", "dies"),
    [(1, -1, 30, (10, 14)), (3, -1, 9, (3, 7)), (1, 15, 15, (15,))],
    ids=["epochs", "accumulated", "max-steps"],
)
def test_a_trainer_that_is_started_again_makes_the_steps_that_are_left(
    jobs: Jobs, tmp_path: pathlib.Path, accumulate: int, limit: int, steps: int, dies: tuple[int, ...]
) -> None:
    more = {"OUTPUT": str(tmp_path / "output"), "ACCUMULATE": str(accumulate), "STEPS": str(limit)}
    training = {"consistency": {"mode": "Sync"}, "optimizer": SGD, "batch": {"base": 4}}
    flags = ("--consistency", "sync", "--optimizer", "sgd", "--learning-rate", "0.01", "--momentum", "0")
    (whole,) = succeed(jobs.start(*flags, **training).trainer(0, SCRIPT, **more))
    whole_result = result(whole)
    assert (whole_result["step"], whole_result["global_step"]) == (steps, steps)
    read = whole_result["read"]
    assert isinstance(read, list) and len(read) == steps * accumulate * 4

    job = jobs.start(*flags, **training)
    for incarnation, step in enumerate(dies):
        killed = job.trainer(0, SCRIPT, DIES=str(step), PSJOB_INCARNATION=str(incarnation), **more)
        assert killed.wait(DEADLINE) == 9
    (rest,) = succeed(job.trainer(0, SCRIPT, PSJOB_INCARNATION=str(len(dies)), **more))
    assert result(rest) == {"step": steps, "global_step": steps, "read": read[dies[-1] * accumulate * 4 :]}
    assert job.server.wait(DEADLINE) == 0 and f"done steps={steps}" in job.log.read_text()
