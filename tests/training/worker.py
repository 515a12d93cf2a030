"""What `torchrun` starts in the tests of several processes: jobs of the tiny recipe, one after the other.

python -m tests.training.worker FOLDER, where FOLDER holds jobs.json, tiny.yaml and the corpus. Each job is a run: its
recipe's overrides, its folder, and what one process does at a step; a recipe in the folder other than tiny.yaml is
named. With "resave", a run that is at its end already writes its last checkpoint once more. Results go to results.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from siamesenorm.cli import leave
from siamesenorm.data import arrays
from siamesenorm.residual import ConfigError
from siamesenorm.training import engine
from siamesenorm.training.engine import EngineModule
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from tests.training.tiny import Watcher


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    prepare, root, cache = arrays.prepare, folder / "corpus", folder / "cache"
    arrays.prepare = lambda source="python-stdlib": prepare(source, cache=cache, root=root)
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), []
    step_of, adopt = EngineModule.optim_step, engine._adopt
    for job in json.loads((folder / "jobs.json").read_text()):

        def step(self, job=job):
            step_of(self)
            if self.trainer.global_step == job.get("at") and rank == job.get("on", 1):
                os.kill(os.getpid(), getattr(signal, job["signal"]))

        EngineModule.optim_step = step
        # The engine saves at the end what it does not know to be saved.
        engine._adopt = (lambda *_: None) if job.get("resave") else adopt
        watcher = Watcher()
        try:
            result = train(
                load(str(folder / job.get("recipe", "tiny.yaml")), job["overrides"]), folder / job["out"], watcher
            )
            results.append({"status": result.status, "summary": result.summary, "message": result.message})
        except ConfigError as error:
            results.append({"status": "refused", "message": str(error)})
        results[-1]["begun"] = watcher.begun
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results[-1]["status"])
        results[-1]["statuses"] = everyone
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    leave(SystemExit(0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
