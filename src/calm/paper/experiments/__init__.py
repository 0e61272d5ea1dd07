"""The paper's tables and figures: runs, measures, and the numbers that the paper reports."""

from calm.paper.experiments import autoencoder, language_model, main, temperature

EXPERIMENTS = {
    experiment.name: experiment
    for module in (main, autoencoder, language_model, temperature)
    for experiment in module.EXPERIMENTS
}
