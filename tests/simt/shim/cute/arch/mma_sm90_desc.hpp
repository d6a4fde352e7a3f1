#pragma once
#include "hopper.h"
namespace cute {
union GmmaDescriptor {
  uint64_t desc_;
  uint32_t reg32_[2];
  GmmaDescriptor() : desc_(0) {}
};
}  // namespace cute
