#include <peerlane/tiles/pipeline.cuh>
