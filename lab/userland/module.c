/*
 * Template of a stand-in kernel module: a real object file whose .modinfo section says what the
 * real module's would, so that the real modinfo and depmod read it. It has no code.
 */
#define INFO(tag, text) \
	static const char info_##tag[] __attribute__((used, section(".modinfo"), aligned(1))) = \
		#tag "=" text

#ifdef MODULE_VERSION
INFO(version, MODULE_VERSION);
#endif
#ifdef MODULE_DEPENDS
INFO(depends, MODULE_DEPENDS);
#else
INFO(depends, "");
#endif
#ifdef MODULE_ALIAS
INFO(alias, MODULE_ALIAS);
#endif
INFO(license, MODULE_LICENSE);
INFO(name, MODULE_NAME);
INFO(vermagic, MODULE_KERNEL " SMP preempt mod_unload modversions ");
