// What joint_attention.cu needs beyond attention_on_cpu.h.

#include "attention_on_cpu.h"
#include "clusters_on_cpu.h"
