// SPDX-License-Identifier: Apache-2.0
// The PTX that the emulator was given, its kernels by name, and what kernels may touch.
#ifndef TOOLS_EMULATOR_PROGRAM_H_
#define TOOLS_EMULATOR_PROGRAM_H_

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/emulator/state.h"

namespace tiercel::emulator {

class Program {
 public:
  // Files and folders of .ptx files, separated by colons.
  void load(const std::string& paths);
  bool has(const std::string& kernel) const { return modules_.count(kernel) != 0; }
  // Decoded on first use. Throws EmulatorError.
  const Kernel& kernel(const std::string& name);
  Allocations& allocations() { return allocations_; }

 private:
  void add_file(const std::string& path);
  void place_variables(const PtxModule& module, std::map<std::string, uint64_t>& addresses);

  struct Module {
    std::unique_ptr<PtxModule> ptx;
    std::map<std::string, uint64_t> addresses;  // of .global and .const variables
  };
  std::list<Module> all_;
  std::map<std::string, Module*> modules_;  // by kernel
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::list<std::vector<uint64_t>> variables_;
  Allocations allocations_;
};

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_PROGRAM_H_
