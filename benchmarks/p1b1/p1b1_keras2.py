"""P1B1's networks in Keras 2, as CANDLE's script builds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.parameters.parameter_set import ParameterSet


def network(
    k: Any, params: ParameterSet, num_features: int, num_types: int, learning_rate: float
) -> Any:
    """Returns the autoencoder, variational or not, compiled; its initial weights are Keras's.

    Args:
        k: The module tf_keras.
        params: The parameters.
        num_features: The values of a profile.
        num_types: The number of cancer types.
        learning_rate: The learning rate, already scaled.
    """
    layers, kind = k.layers, params["model"]
    profile = layers.Input((num_features,))
    types = [layers.Input((num_types,))] if kind == "cvae" else []

    def join(tensor: Any) -> Any:
        return layers.concatenate([tensor, *types]) if types else tensor

    units = params["dense"] or []
    hidden = _dense_layers(k, params, join(profile), units)
    if kind == "ae":
        activation = params["latent_activation"] or params["activation"]
        latent = layers.Dense(params["latent_dim"], activation=activation)(hidden)
        described = []
    else:
        described = [
            layers.Dense(params["latent_dim"], name=f"z_{name}")(hidden)
            for name in ("mean", "log_var")
        ]
        latent = layers.Lambda(_sampler(k, params["epsilon_std"]))(described)
    hidden = _dense_layers(k, params, join(latent), units[::-1])
    decoded = layers.Dense(num_features, activation=params["out_activation"])(hidden)
    optimizer = k.optimizers.deserialize(
        {"class_name": params["optimizer"], "config": {}}, use_legacy_optimizer=True
    )
    optimizer.learning_rate = learning_rate
    metrics = [_cross_entropy(k), _correlation(k)]
    inputs = [profile, *types] if types else profile
    if kind == "ae":
        model = k.Model(inputs, decoded)
        model.compile(optimizer, params["loss"], metrics=metrics)
        return model
    model = _variational(k)(inputs, [decoded, *described])
    model.compile(optimizer, metrics=[[*metrics, "mse"], [], []])
    return model


def _dense_layers(k: Any, params: ParameterSet, tensor: Any, units: Sequence[int]) -> Any:
    layers = k.layers
    for size in units:
        before = tensor
        tensor = layers.Dense(size, activation=params["activation"])(tensor)
        if params["residual"] and before.shape == tensor.shape:
            tensor = layers.add([tensor, before])
        if params["batch_normalization"]:
            tensor = layers.BatchNormalization()(tensor)
        if params["dropout"]:
            dropout = layers.AlphaDropout if params["alpha_dropout"] else layers.Dropout
            tensor = dropout(params["dropout"])(tensor)
    return tensor


def _sampler(k: Any, stddev: float) -> Callable[[Any], Any]:
    """Returns CANDLE's sampling of the latent space."""

    def sample(described: tuple[Any, Any]) -> Any:
        mean, log_variance = described
        noise = k.backend.random_normal(shape=k.backend.shape(mean), mean=0.0, stddev=stddev)
        return mean + k.backend.exp(log_variance / 2) * noise

    return sample


def _cross_entropy(k: Any) -> Callable[[Any, Any], Any]:
    def xent(y_true: Any, y_pred: Any) -> Any:
        return k.losses.binary_crossentropy(y_true, y_pred)

    return xent


def _correlation(k: Any) -> Callable[[Any, Any], Any]:
    mean = k.backend.mean

    def covariance(one: Any, other: Any) -> Any:
        return mean(one * other) - mean(one) * mean(other)

    def corr(y_true: Any, y_pred: Any) -> Any:
        variances = covariance(y_true, y_true) * covariance(y_pred, y_pred)
        return covariance(y_true, y_pred) / (k.backend.sqrt(variances) + k.backend.epsilon())

    return corr


def _variational(k: Any) -> Any:
    """Returns a class of models that train by CANDLE's loss function.

    The function takes the latent space's tensors from outside, which a model can no longer be
    compiled with.
    """
    import tensorflow as tf

    class Variational(k.Model):  # type: ignore[misc]
        """Has the outputs decoded profile, mean and logarithm of the variance."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mean_loss = k.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.mean_loss, *super().metrics]

        def train_step(self, data: Any) -> dict[str, Any]:
            inputs, profile = data
            with tf.GradientTape() as tape:
                outputs = self(inputs, training=True)
                decoded, mean, log_variance = outputs
                entropy = k.losses.binary_crossentropy(profile, decoded)
                divergence = -0.5 * tf.reduce_sum(
                    1 + log_variance - tf.square(mean) - tf.exp(log_variance), axis=-1
                )
                loss = tf.reduce_mean(entropy + divergence / profile.shape[-1])
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            self.mean_loss.update_state(loss)
            self.compiled_metrics.update_state([profile, mean, log_variance], outputs)
            return {metric.name: metric.result() for metric in self.metrics}

    return Variational
