// Likewise; nobody here includes it.
#error "a header of Cubist includes one of the project's own"
