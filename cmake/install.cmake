# Headers, both libraries, the command, data, and the files of find_package and pkg-config.
include(CMakePackageConfigHelpers)
set(cubist_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cubist)
set(cubist_default_linkage static)
if(BUILD_SHARED_LIBS)
  set(cubist_default_linkage shared)
endif()

foreach(linkage static shared)
  install(TARGETS cubist_${linkage} EXPORT cubist-${linkage}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT cubist-${linkage} NAMESPACE cubist:: DESTINATION ${cubist_cmake_dir})
endforeach()

configure_package_config_file(cmake/cubistConfig.cmake.in ${PROJECT_BINARY_DIR}/cubistConfig.cmake
                              INSTALL_DESTINATION ${cubist_cmake_dir})
# Before 1.0 an interface lasts for a minor version.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cubistConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cubistConfig.cmake ${PROJECT_BINARY_DIR}/cubistConfigVersion.cmake
        DESTINATION ${cubist_cmake_dir})
file(RELATIVE_PATH cubist_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/cubist.pc.in ${PROJECT_BINARY_DIR}/cubist.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cubist.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The headers of cubist/, and whatever of ours they include, found when it is installed.
install(CODE "set(source \"${PROJECT_SOURCE_DIR}\")
set(destination \"${PROJECT_BINARY_DIR}/include\")
set(with_command ${CUBIST_BUILD_TOOLS})
include(\"${PROJECT_SOURCE_DIR}/cmake/public_headers.cmake\")")
install(DIRECTORY ${PROJECT_BINARY_DIR}/include/cubist DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

if(CUBIST_BUILD_TOOLS)
  install(TARGETS cubist_tools EXPORT cubist-command ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT cubist-command NAMESPACE cubist:: DESTINATION ${cubist_cmake_dir})
  install(TARGETS cubist RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/npu_model/data/ DESTINATION ${CMAKE_INSTALL_DATADIR}/cubist/data)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/workloads/ DESTINATION ${CMAKE_INSTALL_DATADIR}/cubist/workloads
          FILES_MATCHING PATTERN "*.json")
endif()
