# SPDX-License-Identifier: Apache-2.0
# Fails if one of OBJECTS defines a weak symbol, according to NM.
foreach(object ${OBJECTS})
  execute_process(COMMAND "${NM}" -C --defined-only "${object}" OUTPUT_VARIABLE symbols
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [VWu] [^\n]*" weak "${symbols}")
  # A pointer to the C++ runtime, which sanitizers use.
  list(FILTER weak EXCLUDE REGEX "DW\\.ref\\.")
  if(weak)
    string(REPLACE ";" "\n  " weak "${weak}")
    message(FATAL_ERROR
      "${object} is compiled for a newer processor and defines weak symbols:\n  ${weak}\n"
      "The linker may use them for all processors. In *_loops.cc, use no templates of "
      "the standard library, and put helpers into an anonymous namespace.")
  endif()
endforeach()
