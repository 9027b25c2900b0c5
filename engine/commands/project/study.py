"""What does the average of the weights contribute? The same training with it and without, over several seeds.

python study.py
"""

from functools import partial

from train import build

from signalfire.ablation import LeaveOneOut, Study


def main() -> None:
    study = Study(partial(build, epochs=5), metric="val_accuracy", seeds=range(6), store="runs/study.jsonl")
    design = LeaveOneOut(["ema"])
    print(study.plan(design))
    report = study.run(design, workers=0)
    print(f"\n{report}\n")
    print(*report.sentences(), sep="\n")


if __name__ == "__main__":
    main()
