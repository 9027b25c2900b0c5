"""The codes of findings: what each one means, and how serious it is.

A code's letter says where it comes from: C from `Engine.check`, which checks a setup before it runs; G from
`handlers.Guards`, which watches a run; W from the engine and its handlers as they run. Codes are never used twice: one that is
dropped stays unused.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["CODES", "PRINTED", "REPEATS", "Severity"]

Severity = Literal["info", "warning", "error"]

_INFORMATION = {
    *("W07", "W09", "W31", "W43", "W52", "W58", "W59", "W63"),
    *("C02", "C13", "C19", "C23", "C39", "C40", "C42", "G13", "G24"),
}
"""Codes that need nothing done; all others are warnings."""

_TEXTS = {
    # W0x: metrics and the handlers that monitor them
    "W01": 'A handler monitors a metric in the wrong direction, such as `mode="max"` for a loss, so it would keep '
    "the worst value.",
    "W02": "A monitored metric is NaN. NaN never counts as an improvement: it uses up patience, and the weights that "
    "were evaluated when it occurred are not kept or exported as the best.",
    "W03": "The class of the batch has no length, so each batch counts as one sample. Averages then give a short last "
    "batch the same weight as a full batch.",
    "W04": "A metric is not computed over all samples, or may not be. It is either the value of the last "
    "batch, or the mean of per-batch values, which for a metric such as F1 differs from the value over all samples.",
    "W05": "`Accuracy` compares scores with a threshold for probabilities, but the scores lie outside the range from "
    "0 to 1, as logits do.",
    "W06": "A handler monitors a metric of the training data, although validation metrics are also measured. "
    "Overfitting goes undetected.",
    "W07": "The metric has too few values in this run to exhaust the patience of `EarlyStopping`, so the patience "
    "cannot stop the run.",
    "W08": "`min_delta` is at least as large as every value of the metric so far. Improvements may therefore be too "
    "small to count, and the run stops early.",
    "W09": "A check raised an error and was skipped. The run does not depend on the check, so it continues.",
    # W1x: steps and optimizers
    "W10": "The engine trains nothing: no `Update` has an optimizer, but `run` was called for several epochs, as in training.",
    "W11": "Parameters of the model are in no optimizer, because a layer was created, replaced or unfrozen after the "
    "optimizer was built. They do not train.",
    "W12": "Optimizer steps ran, but no parameter had a gradient, so the model does not learn. Usually the "
    "graph is cut between the parameters and the loss.",
    "W13": "Some parameters in the optimizer had no gradient at any step of an epoch, so they do not train. The "
    "finding is only informational if these are a minority.",
    "W14": "Modules were set to eval mode during training and stayed in eval mode, so dropout is off and batch "
    "statistics are frozen.",
    "W15": "Weights or the loss are NaN. Training cannot recover from NaN weights.",
    "W16": "Gradients were cleared inside an accumulation window, so the step uses only the batches after that point.",
    "W17": "Your code calls `optimizer.step()`, which the engine also calls. The engine counts only its own steps, so "
    "it does not count all of them.",
    "W18": "The learning rate is 0 for a whole epoch, so nothing is learned; or it is negative, so steps increase the "
    "loss.",
    "W19": "A guard skipped steps, or rewound the run and skipped batches, because gradients or losses were not "
    "finite, or were far above their usual values.",
    # W2x: data
    "W20": "An evaluation draws its samples with replacement, so samples may count more than once or not at all.",
    "W21": "The data yields more batches than its length says, or the evaluation data yields fewer. Schedules and "
    "progress rely on the length.",
    "W22": "A batch contains an object of a class that `DeviceTransfer` cannot move, so the tensors in this object "
    "stay on their device.",
    "W23": "The data yields single samples or whole arrays, and each is treated as a batch.",
    "W24": "Workers of the `DataLoader` draw from generators that a resumed run does not restore, so the resume is "
    "not exact.",
    "W25": "Ranks that should have the same data have different data. If the engine also shards this data over the "
    "ranks, part of it is never used.",
    "W26": "Every worker iterates over the whole iterable dataset, so each sample appears once per worker in an epoch.",
    "W27": "BatchNorm normalizes over the batch, but its input has a single sample, so the batch statistics are those of "
    "this one sample.",
    "W28": "Your code changed batches of the data in place, so later epochs train on the changed batches.",
    "W29": "An update ran no optimizer step, because its function returned no loss. A missing `return` is the usual cause.",
    # W3x: checkpoints and resuming
    "W30": "`Checkpoint(trained_only=True)` leaves nothing out, because no parameter is frozen when the run starts.",
    "W31": "The run resumes from a saved state. It continues at the saved epoch and iteration.",
    "W32": "The run resumes with options, handlers or data that differ from those of the saved run, so it does not "
    "continue the saved run exactly.",
    "W33": "Entries in the checkpoint folder cannot be read and are skipped.",
    "W34": "A log on disk is not the log that the saved run was writing, so rows may be missing.",
    "W35": "Weights that you changed between `load_state_dict` and `run` are overwritten by the weights in the loaded "
    "state.",
    "W36": "The run starts at epoch 1 although the checkpoint folder contains the checkpoint of a preempted run.",
    "W37": "A run ended, and its `Checkpoint` handler wrote nothing: its interval was never reached, or its metric "
    "never had a value.",
    "W38": "The log was moved, replaced or removed while the run was writing to it, for example by a second process "
    "that uses the same path. Later rows of this run do not reach this path.",
    "W39": "Output is lost: a handler was never attached, no logger receives a logged value, or a file format cannot "
    "store part of the output.",
    # W4x: how functions and handlers are attached and connected
    "W40": "A logged value, such as an image with values out of range, cannot be written as it is.",
    "W41": "A function is never called, or called too late: a method lacks `@on(...)`, or a metric is written only "
    "after a handler that monitors the metric has read it.",
    "W42": "A loss module has trainable parameters that no optimizer of the engine holds, so the engine does not "
    "train them.",
    "W43": "The parameters of a loss module are trained, moved and saved with those of the model.",
    "W44": "One function is connected twice, so it is called twice at each event. Running a notebook cell again is "
    "the usual cause.",
    "W45": "`Engine.without` was called without `with`, so it disabled nothing.",
    "W46": "You wrapped the model in `torch.nn.parallel.DistributedDataParallel`, but the engine runs as a single "
    "process. Each rank measures, saves and logs as if it were alone: the ranks may read the same data and write "
    "the same files.",
    "W47": "A run cannot resume from a saved state, or cannot resume exactly, because a handler overrides `state_dict` "
    "but not `load_state_dict`, `torch.load` rejects an object, or the state lacks a value that the forward pass or a "
    "handler changes.",
    "W48": "`Engine.on` was called without a function to decorate, so nothing is connected.",
    "W49": "A function or handler is connected to an event that this engine never emits, so it is never called.",
    # W5x: evaluation
    "W50": "Reading the evaluation samples draws random numbers, as random augmentation does. If the samples depend "
    "on them, the metrics are those of randomly changed samples.",
    "W51": "An evaluator measures a model other than the one being trained, so its metrics do not reflect the "
    "training.",
    "W52": "Parts of the model are in eval mode when a training run begins. Frozen parts stay in eval mode, so their "
    "dropout is off and their batch statistics do not update; other parts are set to training mode.",
    "W53": "An evaluator measures nothing, because no handler is attached to it and no function is connected.",
    "W54": "Predictions are collected from shuffled data, so their order differs from the order of the dataset.",
    "W55": "After this run, an average of the weights still consists mostly of the weights with which it started, so "
    "evaluation metrics may be worse than training metrics.",
    "W56": "An evaluator that is run separately from the trainer, or a test of loaded weights, measures the weights of "
    "the last step instead of their averages (EMA, SWA).",
    "W57": "An evaluation runs with modules in training mode, or applies dropout. Its metrics may be random, and "
    "batch statistics may change.",
    "W58": "A handler, such as `FastDevRun`, `LimitBatches` or `OverfitBatches`, limits the data of this run.",
    "W59": "`drop_last=True` leaves out evaluation samples or training samples.",
    "W60": "The evaluation inputs are on a different scale than the training inputs, so they seem to be normalized "
    "differently.",
    # W6x: logs and progress, and more about runs
    "W61": "The progress bar is set to show a metric that nothing measures.",
    "W62": "A logger is attached to an evaluator that runs several times. The evaluator's epochs and iterations "
    "restart with each evaluation, so the rows do not show when during training an evaluation ran. A trace also "
    "restarts with each evaluation.",
    "W63": "The interval of a logger is longer than the run, so the logger wrote neither losses nor learning rates.",
    "W64": "The accuracy never exceeded the accuracy of always predicting the most frequent class, so the model seems "
    "to learn nothing about the labels.",
    "W65": "A loss reads the iteration or epoch of its engine. An evaluator counts from 1 in each evaluation, so the "
    "evaluator may compute a different loss than the trainer.",
    "W66": "Other code replaced the signal handler of `Preemption`, so a preemption signal does not save the run.",
    "W67": "`load_state_dict` received the model's own tensors. `state_dict()` returns references, so these tensors "
    "changed during training.",
    "W68": "A function changes the trained weights when a run continues, because it initializes them at `STARTED`, "
    "which every `run()` emits.",
    "W69": "With `TruncatedBPTT`, the forward pass never carries the hidden state over, so each chunk starts from a "
    "hidden state of zeros.",
    "W70": "Ranks that should each have their own data have equal tensors in their first batches, so they seem to "
    "train on the same samples.",
    # W7x: losses and gradients
    "W71": "Two updates train the same parameters, so the loss of each update also changes parameters that the other "
    "update trains.",
    "W72": "The loss receives the wrong kind of output, such as probabilities where it expects logits. The model "
    "trains slowly, or not at all.",
    "W73": "Output and targets have different shapes and are broadcast in the loss, so every output is compared with "
    "every target.",
    "W74": "The loss is divided by the length of the accumulation window, but the engine already averages over the "
    "window, so gradients are too small.",
    "W75": "Parameters have gradients before the first backward pass of a window, for example because your code calls "
    "`backward()`. The step includes these gradients.",
    "W76": "Your code keeps losses or outputs with their graphs, so the memory of these iterations is not freed.",
    "W77": "Targets are outside the range that the loss accepts, or outside the range of the activation before the loss.",
    "W78": "The global generator is seeded in each iteration, so dropout draws the same mask every time.",
    "W79": "The loss is computed over a single class, so it is constant and its gradients are zero.",
    # W8x: functions and handlers, studies, and more about losses
    "W80": "A function changes only the reported loss. Gradients come from `backward_loss`, which is unchanged.",
    "W81": "The runs of a study are identical although their seeds differ, so a single result is probably counted "
    "several times.",
    "W82": "The runs of a study start with handlers, updates, weights or data that differ from those of earlier runs "
    "with the same seed, so the runs are not independent.",
    "W83": "The loss is a sum over the batch, but the engine averages the batches of a window, so the step matches "
    "neither the sum nor the mean over the window.",
    "W84": "Optimizer steps ran, but no weight changed, because gradients are zero, or steps are below the precision "
    "of the weights.",
    "W85": "A function returns a batch or a loss, but return values of connected functions are ignored.",
    "W86": "A learning-rate scheduler was built for an optimizer, but was not stepped in a run of several epochs, so the "
    "learning rate was constant.",
    "W87": "A function steps the scheduler, so checkpoints do not contain the position of the scheduler, and a resumed "
    "run restarts the schedule.",
    "W88": "A recurrent or attention layer treats the samples of a batch as time steps, because it expects the time "
    "dimension first.",
    "W89": "Something other than the schedule changes the learning rate.",
    "W90": "The loss is a negated distance, so minimizing it increases the distance.",
    "W91": "A function evaluates the model in training mode, where dropout and batch normalization behave differently.",
    "W92": "The loss depends on trainable tensors that no optimizer holds, such as those of an older model.",
    "W93": "A reshape where a transpose was needed, or a softmax over the batch, mixes the values of different samples "
    "or positions.",
    "W94": "The forward pass uses only one output step of a recurrent layer. This step is padding in the shorter "
    "sequences, or was computed without seeing any other step. In a bidirectional layer, the latter holds for the "
    "backward direction.",
    "W95": "The loss is computed over padding, so the model learns to predict the padding token.",
    "W96": "The loss is a mean over targets, but the weights of the batches (of a window, or of the ranks) do not "
    "match their numbers of targets, so the targets do not count equally.",
    "W97": "The first loss is far above that of random guessing, usually because the inputs or the initial weights "
    "are too large.",
    "W98": "The inputs of the model contain the targets, so the model can copy them, unless it shifts or masks them.",
    "W99": "A term of the loss has no gradient, so it changes the reported loss but trains nothing.",
    # C: what `Engine.check` finds before a run
    "C01": "A handler monitors a metric that nothing measures.",
    "C02": "Metrics are measured, but no handler logs, shows or monitors them.",
    "C03": "Two handlers use the same value at the same event, phase and rank, and at least one of them writes it, so "
    "the order in which you attach them may matter.",
    "C04": "Gradients are clipped twice.",
    "C05": "A schedule steps in a different unit than it was written for: its lengths are in epochs, for example, but "
    "it steps after each optimizer step.",
    "C06": "A schedule is longer than the run, so it never reaches its end; or it is shorter than the run, so the "
    "learning rate is wrong for the rest of the run. Omit its length (`T_max`, `total_steps`): `LRScheduling` fills it "
    "in.",
    "C07": "An optimizer holds parameters that do not belong to the model, such as those of an older model.",
    "C08": "Trainable parameters are in no optimizer, so they do not train.",
    "C09": "Parameters are frozen (`requires_grad=False`).",
    "C10": "Two handlers write to the same file.",
    "C11": 'A `Checkpoint` handler is named "best", but keeps the latest states, because it monitors no metric.',
    "C12": "The batches and the model are on different devices, and nothing moves the batches.",
    "C13": "The training data is not shuffled.",
    "C14": "The validation data contains training samples, so its metrics cannot show overfitting.",
    "C15": "An evaluator has a different model, which shares no parameters with the model being trained.",
    "C16": "Random augmentation draws from generators that a resumed run does not restore, so the resume is not exact.",
    "C17": "An interval is longer than this run, so the action that it triggers does not run in it.",
    "C18": "Weight averaging is set to start after the end of this run, so this run has no averages.",
    "C19": "The metric has too few values in this run to exhaust the patience, so the patience cannot stop the run.",
    "C20": "An evaluation measures nothing, because the evaluator has no handlers and no connected functions.",
    "C21": "The last batch has one sample, for which BatchNorm cannot compute a variance. PyTorch may raise an error.",
    "C22": "An accumulation window is longer than an epoch. Windows end with the epoch, so steps use fewer batches.",
    "C23": "A schedule changes the learning rates of only some optimizers.",
    "C24": "Data that can be iterated only once, such as a generator, is used for several epochs.",
    "C25": "A function clips gradients that are still scaled for float16, so the bound is far too small.",
    "C26": "A function clips gradients at an event where no gradients exist, or before the accumulation window is "
    "complete.",
    "C27": "The model keeps trainable tensors or layers in a plain list or attribute, where PyTorch does not find "
    "them, so they are not trained, moved or saved.",
    "C28": "An optimizer option has a value that keeps training from converging. Use values such as `lr=1e-3, "
    "weight_decay=1e-2` with AdamW.",
    "C29": "Labels are smoothed twice, by the loss and by `LabelSmoothing`.",
    "C30": "The process was launched as one of several, for example by `torchrun`, but no handler connects the "
    "processes, so each one trains alone.",
    "C31": "`Preemption` would stop the run, but no receiver seems to save its state.",
    "C32": "Weights are trained in float16, where small gradients and small steps become zero.",
    "C33": "A dropout layer drops nearly all of its inputs. Or all units of a layer start with the same weights, so "
    "the units stay identical, or differ only in their biases.",
    "C34": "The running statistics of a BatchNorm layer stay as they are, or come almost only from the "
    "last batch, because its `momentum` follows the opposite convention. In PyTorch, `momentum` is the weight of the "
    "new batch.",
    "C35": "`requires_grad` was set on a module, where PyTorch ignores it. The parameters are not frozen.",
    "C36": "The same layer object appears in several places in the model, so these places share its weights, as in "
    "`[layer] * n`.",
    "C37": "Linear layers follow each other without an activation, so together they are one linear map.",
    "C38": "A handler for multi-process training is attached in a notebook, which runs as a single process.",
    "C39": "`SpikeGuard` needs all steps of the run, or more, to learn the usual loss, so it detects no spikes.",
    "C40": "A metric name without a prefix was taken to mean the validation metric.",
    "C41": "Some processes are idle, because there are more processes than compute shards, or because the number of "
    "processes does not divide the number of shards.",
    "C42": "In each process, a function is called only for that process's shards, so its result depends on the number of "
    "processes.",
    # G: what `handlers.Guards` finds in a run
    "G01": "Parameters in the optimizer have no gradient, so they do not train. The finding is only informational if "
    "these are a minority.",
    "G02": "All gradients are zero, so the step changes nothing.",
    "G03": "An optimizer step does not change the weight with the largest gradient.",
    "G04": "The learning rate is 0.",
    "G05": "Parameters of the model are in no optimizer, probably because a layer was created, replaced or unfrozen after "
    "the optimizer was built.",
    "G06": "Modules are in eval mode in the forward pass during training, so dropout is off and batch statistics are frozen.",
    "G07": "Dropout is active in an evaluation, so its metrics are random.",
    "G08": "The running statistics of normalization layers change in an evaluation, so evaluating changes the model.",
    "G09": "The weights differ between ranks, so the ranks train different models.",
    "G10": "Nothing cleared the gradients of an earlier iteration, so the step includes these gradients.",
    "G11": "The data yields the same batch again and again.",
    "G12": "Labels are outside the valid range, which is from 0 to the number of classes minus 1, so they belong "
    "to no class.",
    "G13": "The inputs have large values, so they do not seem normalized. If the inputs cannot be identified, the "
    "finding is about the first floating-point tensor of the batch.",
    "G14": "The inputs contain NaN, or the loss is NaN or infinite.",
    "G15": "In each of the last three checks, all labels of the batch were of one class. The finding is only "
    "informational if this is the same class in all batches.",
    "G16": "The model gives the same output for all samples of a batch, although their inputs differ.",
    "G17": "The loss is exactly the same for different batches, so it does not depend on the data.",
    "G18": "The learning rate is almost 0 before the middle of the run: the schedule decays fast, ends early, or counts in "
    "the wrong unit.",
    "G19": "The gradient norm has grown by a factor of a million, so training diverges.",
    "G20": "Your code calls `optimizer.step()` in addition to the engine.",
    "G21": "Frozen normalization layers still update their running statistics.",
    "G22": "Only normalization layers are trained, and the last layer is frozen, so the model cannot learn new "
    "classes.",
    "G23": "The power iteration of a spectral norm has not run, or has not run with the weights being evaluated, so "
    "these weights are divided by a number that is too small.",
    "G24": "In every check of an epoch (at least five), the loss was within 1 % of the loss of random guessing.",
}

CODES: dict[str, tuple[Severity, str]] = {
    code: ("info" if code in _INFORMATION else "warning", text) for code, text in _TEXTS.items()
}
"""For each code its default severity, and what it means and why it matters in any case of it."""

PRINTED = frozenset(
    ("W04", "W06", "W13", "W47", "W58", "W59", "C06", "C13", "C17", "C19", "C40", "G01", "G13", "G15", "G24")
)
"""Codes whose information is printed as one line on stderr when it is found in a run, since it is about what the run does."""

REPEATS: dict[str, tuple[str, ...]] = {
    "W11": ("C08", "G05"),
    "W12": ("G01", "G03", "W92"),
    "W14": ("G06",),
    "W15": ("G14",),
    "W53": ("C20",),
    "W57": ("G07", "G08"),
    "C08": ("W42",),
    "W75": ("G10",),
    "W37": ("C01", "C17"),
    "W92": ("W42", "C27"),
}
"""What a code repeats: after one of these in the same run, it is listed as information, and does not warn again."""
