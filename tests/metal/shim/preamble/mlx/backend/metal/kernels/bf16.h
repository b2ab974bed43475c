// In place of MLX's: the type is the shim's.
#pragma once
