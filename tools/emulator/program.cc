// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/program.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tiercel::emulator {
namespace {

// "{1, 2, 0f3F800000}" as elements of some bytes each.
void initialise(const PtxVariable& variable, uint8_t* to) {
  size_t offset = 0;
  const char* text = variable.initial.c_str();
  while (*text != '\0') {
    if (!std::isdigit(static_cast<unsigned char>(*text)) && *text != '-') {
      if (std::isalpha(static_cast<unsigned char>(*text))) {
        throw EmulatorError("variable " + variable.name + " begins as " + variable.initial +
                            ", which is not understood");
      }
      ++text;
      continue;
    }
    char* end = nullptr;
    const bool bits = text[0] == '0' && text[1] != '\0' && std::strchr("fFdD", text[1]) != nullptr;
    const uint64_t value = bits ? std::strtoull(text + 2, &end, 16) : std::strtoull(text, &end, 0);
    const size_t bytes = static_cast<size_t>(variable.element_bytes);
    if (offset + bytes > variable.size) throw EmulatorError("too many values of " + variable.name);
    std::memcpy(to + offset, &value, bytes);
    offset += bytes;
    text = end + (*end == 'U');
  }
}

}  // namespace

void Program::load(const std::string& paths) {
  std::istringstream list(paths);
  for (std::string path; std::getline(list, path, ':');) {
    if (path.empty()) continue;
    if (!std::filesystem::is_directory(path)) {
      add_file(path);
      continue;
    }
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(
             path, std::filesystem::directory_options::follow_directory_symlink)) {
      if (entry.path().extension() == ".ptx") files.push_back(entry.path().string());
    }
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) add_file(file);
  }
}

void Program::add_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw EmulatorError("PTX file " + path + " cannot be read");
  all_.push_back({std::make_unique<PtxModule>(path, text.str()), {}});
  Module& module = all_.back();
  place_variables(*module.ptx, module.addresses);
  for (const auto& [name, place] : module.ptx->entries()) modules_.insert({name, &module});
}

void Program::place_variables(const PtxModule& module, std::map<std::string, uint64_t>& addresses) {
  for (const PtxVariable& variable : module.variables()) {
    if (variable.space == "shared") continue;
    if (variable.align > 256) throw EmulatorError("variable " + variable.name + " aligned so much");
    variables_.emplace_back(variable.size / 8 + 64, 0);
    uint64_t address = reinterpret_cast<uintptr_t>(variables_.back().data());
    address = (address + 255) / 256 * 256;
    initialise(variable, reinterpret_cast<uint8_t*>(address));
    addresses[variable.name] = address;
    allocations_.add(address, variable.size, "variable " + variable.name,
                     variable.space == "const");
  }
}

const Kernel& Program::kernel(const std::string& name) {
  std::unique_ptr<Kernel>& made = kernels_[name];
  if (made == nullptr) {
    Module& module = *modules_.at(name);
    made = decode_kernel(*module.ptx, name, &module.addresses);
  }
  return *made;
}

}  // namespace tiercel::emulator
