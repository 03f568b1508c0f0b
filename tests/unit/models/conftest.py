import pytest


@pytest.fixture
def fast_kernels():
    from candle_p1.models import fast

    fast.choose("fast", on_cpu=True)
    yield
    fast.choose("plain", on_cpu=True)


@pytest.fixture
def double_precision():
    """Lets Keras's backend compute in float64, which JAX does only where it is told to."""
    import keras

    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
